"""The row of one rank's link on a timeline: what was sent when, and below it what was hidden or exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import analysis
from .figure import (
    EXPOSED_COLOUR,
    HIDDEN_COLOUR,
    HIDDEN_TEXT_COLOUR,
    QUIET_COLOUR,
    TEXT_COLOUR,
    binary_size,
    milliseconds,
    text_points,
)
from .intervals import Interval, intersect, merge, total
from .pen import ROW, Pen
from .spans import LINK, Span

QUEUED = "queued"


def draw_link(pen: Pen, spans: list[Span], top: float, named: set[str]) -> None:
    """Draw the transfers of one rank one after the other. named: as for `timeline_rows.draw_rank`."""
    sent = sorted((span for span in spans if span.lane == LINK), key=lambda span: (span.start, span.end))
    if not sent:
        pen.text(pen.origin, top + ROW / 2, "nothing sent", QUIET_COLOUR, 9, ha="left", shift=4)
        return
    hidden, exposed = analysis.hidden_intervals(spans), analysis.exposed_intervals(spans)
    free = sent[0].start
    queued, borders, on_link = [], [], []
    for span in sent:
        # In flight at once, they share one link: each is drawn from when the one before is through.
        begins = max(span.start, free)
        if begins - span.start > pen.seconds(2):
            queued += [
                [(span.start, top - 0.3), (span.start, top - 0.06)],
                [(span.start, top - 0.18), (begins, top - 0.18)],
            ]
        if span.end > begins:
            on_link.append((span, (begins, span.end)))
            borders.append([(begins, top), (begins, top + ROW)])
        free = max(free, span.end)
    pen.boxes(hidden, top, HIDDEN_COLOUR)
    pen.boxes(exposed, top, EXPOSED_COLOUR)
    pen.lines(borders, "white", 1.0)
    pen.lines(queued, QUIET_COLOUR, 0.8)
    unit = _describe_link(pen, sent, top)
    for span, time in on_link:
        _label_sent(pen, span, time, top, hidden, exposed, unit)
    _name_queue(pen, queued, top, named)


def _describe_link(pen: Pen, sent: list[Span], top: float) -> str | None:
    """How many and how much, before the first transfer or, where that is too narrow, left of the axes.

    Returns the unit that it gives for all of them.
    """
    buckets = [span for span in sent if span.detail.startswith("bucket")]
    others = [span for span in sent if not span.detail.startswith("bucket")]
    first, noun = (buckets, "bucket") if buckets else (others, "message")
    parts = [_count(first, noun) + _amount(first)]
    if buckets and others:
        parts.append(_count(others, "message"))
    unit = None if buckets and others else binary_size(max(span.bytes or 0 for span in sent)).split()[-1]
    # DDP's own small messages at a step's start are too narrow to be in the way.
    begins = next((span.start for span in sent if pen.points((span.start, span.end)) > 4), sent[0].start)
    summary = " + ".join(parts)
    if text_points(summary, 9) + 10 < pen.points((pen.origin, begins)):
        pen.text(pen.origin, top + ROW / 2, summary, QUIET_COLOUR, 9, ha="left", shift=3)
    else:
        beside = "\n+ ".join(parts).replace(" of ", "\nof ").replace(", ", "\n")
        pen.text(pen.origin, top + 0.95, beside, QUIET_COLOUR, 7.5, ha="right", va="top", shift=-6)
    return unit if f" {unit}" in summary else None


def _count(spans: Sequence[Span], noun: str) -> str:
    return f"{len(spans)} {noun}" + ("s" if len(spans) > 1 else "")


def _amount(spans: Sequence[Span]) -> str:
    """How much was sent: of each where they are alike, otherwise the sum."""
    sizes = {binary_size(span.bytes or 0) for span in spans}
    if len(sizes) == 1:
        return f" of {sizes.pop()}"
    return f", {binary_size(sum(span.bytes or 0 for span in spans))} in all"


def _name_queue(pen: Pen, queued: Sequence[Any], top: float, named: set[str]) -> None:
    """Beside the queue: what the lines are."""
    if not queued or QUEUED in named:
        return
    first = min(path[0][0] for path in queued)
    if text_points(QUEUED, 7.5) + 6 < pen.points((pen.origin, first)):
        named.add(QUEUED)
        pen.text(first, top - 0.18, QUEUED, QUIET_COLOUR, 7.5, ha="right", shift=-3)


def _label_sent(
    pen: Pen,
    span: Span,
    time: Interval,
    top: float,
    hidden: list[Interval],
    exposed: list[Interval],
    unit: str | None,
) -> None:
    """Write how much was sent, in the longer of the hidden and the exposed part.

    unit: the one that the row gives, in which a number alone is clear.
    """
    parts = [
        (part[1] - part[0], part, colour)
        for intervals, colour in ((hidden, TEXT_COLOUR), (exposed, "white"))
        for part in intersect(intervals, [time])
    ]
    if span.bytes is None or not parts:
        return
    _, part, colour = max(parts, key=lambda candidate: candidate[0])
    size = binary_size(span.bytes)
    number, its_unit = size.split()
    names = [size] if span.name == "all_reduce" else [f"{span.name} {size}", span.name, size]
    pen.label_first(part, top, [*names, number] if its_unit == unit else names, colour)


@dataclass
class _Amount:
    text: str
    colour: str
    bracket: Interval | None
    half: float

    @property
    def middle(self) -> float:
        return sum(self.bracket) / 2 if self.bracket else 0.0

    @property
    def width(self) -> float:
        return self.bracket[1] - self.bracket[0] if self.bracket else 0.0


def draw_amounts(pen: Pen, spans: list[Span], top: float) -> None:
    """Below the link: how much was hidden, how much exposed."""
    if not analysis.communication(spans):
        return
    amounts = []
    whole = total(analysis.communication(spans))
    for word, intervals, colour in (
        ("hidden", analysis.hidden_intervals(spans), HIDDEN_TEXT_COLOUR),
        ("exposed", analysis.exposed_intervals(spans), EXPOSED_COLOUR),
    ):
        shown = _joined([interval for interval in intervals if pen.points(interval) > 2], pen.seconds(16))
        low, high = top + 0.12, top + 0.28
        brackets = [[(start, low), (start, high), (end, high), (end, low)] for start, end in shown]
        pen.lines(brackets, colour, 1.3)
        longest = max(shown, key=lambda interval: interval[1] - interval[0], default=None)
        seconds = total(intervals)
        # A thousandth of it is not worth four digits.
        text = f"{word} {milliseconds(seconds) if seconds > whole / 1000 else '0'} ms"
        half = pen.seconds(text_points(text, 9.5, bold=True)) / 2
        amounts.append(_Amount(text, colour, longest, half))
    for amount, middle in zip(amounts, _middles(amounts[0], amounts[1], pen.seconds(8)), strict=True):
        # At the left edge there is nowhere to go but inside.
        middle = max(middle, pen.origin + amount.half)
        pen.text(middle, top + 0.36, amount.text, amount.colour, 9.5, va="top", weight="bold")


def _joined(intervals: list[Interval], gap: float) -> list[Interval]:
    """The same, with those joined that lie closer than `gap`: one bracket for many buckets in a row."""
    wider = merge((start, end + gap) for start, end in intervals)
    return [(start, end - gap) for start, end in wider]


def _middles(hidden: _Amount, exposed: _Amount, gap: float) -> tuple[float, float]:
    """Where the two texts go: under their brackets, and where they would touch, the wider one's gives way."""
    apart = hidden.half + exposed.half + gap
    if not hidden.bracket:
        return exposed.middle - apart, exposed.middle
    if not exposed.bracket:
        return hidden.middle, hidden.middle + apart
    left, right = hidden.middle, exposed.middle
    if abs(right - left) < apart:
        away = apart if right >= left else -apart
        if hidden.width > exposed.width:
            left = right - away
        else:
            right = left + away
    return left, right
