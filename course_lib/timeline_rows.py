"""The rows of one rank on a timeline: its own spans, its compute, its link, and what was hidden or exposed.

`timeline` decides what stands where; here it is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from . import analysis
from .figure import (
    EXPOSED_COLOUR,
    HIDDEN_COLOUR,
    HIDDEN_TEXT_COLOUR,
    NEUTRAL_COLOUR,
    QUIET_COLOUR,
    TEXT_COLOUR,
    megabytes,
    milliseconds,
    rank_colour,
    readable_on,
    text_points,
    tint,
)
from .pen import ROW, Pen
from .spans import INPUT, LINK, Span

# How light or dark a rank's colour is for each phase.
PHASES = {"forward": 0.4, "backward": 1.0, "optimizer": 1.5}
GAP, BELOW = 0.46, 1.15  # rows between two rows of a rank, and below its link
BESIDE = 62  # points kept free on the right for the length of the step


@dataclass(frozen=True)
class Rows:
    """Where a rank's rows begin, in rows from the top; None for a row that it does not need."""

    top: float
    own: float | None
    compute: float | None
    link: float | None
    bottom: float
    height: float

    def names(self) -> list[tuple[float, str]]:
        """The middle of each row and its name."""
        rows = ((self.own, "yours"), (self.compute, "compute"), (self.link, "link"))
        return [(row + ROW / 2, name) for row, name in rows if row is not None]


def own_spans(spans: Sequence[Span]) -> list[Span]:
    """The spans that the learner named, longest first, so that what lies within is drawn on top."""
    known = (*analysis.COMPUTE_NAMES, analysis.WAIT)
    own = [span for span in spans if span.lane not in (LINK, INPUT) and span.name not in known]
    return sorted(own, key=lambda span: -span.seconds)


def rows_of(spans: Sequence[Span], top: float) -> Rows:
    """The rows that these spans of one rank need, from `top` down."""
    number = len(own_spans(spans))
    own = top if number else None
    if number == len(spans):
        return Rows(top, own, None, None, top + ROW, ROW + GAP)
    compute = top + ROW + GAP if number else top
    link = compute + ROW + GAP
    return Rows(top, own, compute, link, link + ROW, link + ROW + BELOW - top)


def draw_rank(
    ax: Axes, spans: list[Span], rows: Rows, origin: float, *, explain: bool, fastest: bool = False
) -> None:
    """Draw the spans of one rank. explain: name also what is too narrow for a name inside."""
    colour = rank_colour(spans[0].rank)
    pen = Pen(ax, origin)
    if rows.own is not None:
        _draw_own(pen, own_spans(spans), rows.own)
    if rows.compute is not None and rows.link is not None:
        _draw_bands(pen, spans, rows.compute, rows.link + ROW)
        _draw_compute(pen, spans, rows.compute, colour, explain)
        _draw_link(pen, spans, rows.link, explain)
        _draw_amounts(pen, spans, rows.link + ROW)
    start, end = analysis.window(spans)
    pen.lines([[(end, rows.top - 0.05), (end, rows.bottom + 0.05)]], TEXT_COLOUR, 1.2)
    text = f"{milliseconds(end - start)} ms" + ("\nfastest" if fastest else "")
    pen.text(end, (rows.top + rows.bottom) / 2, text, TEXT_COLOUR, 10, ha="left", shift=5, weight="bold")


def _draw_own(pen: Pen, spans: list[Span], top: float) -> None:
    free = -1.0
    for span in spans:
        pen.boxes([(span.start, span.end)], top, NEUTRAL_COLOUR, edge="white")
    for span in sorted(spans, key=lambda span: span.start):
        inner = [(s.start, s.end) for s in spans if s.seconds < span.seconds]
        seen = analysis.subtract([(span.start, span.end)], inner)
        widest = max(seen, key=lambda part: part[1] - part[0], default=(span.start, span.start))
        if not pen.label(widest, top, span.name, TEXT_COLOUR) and pen.x(span.start) > free:
            pen.text(span.start, top - 0.06, span.name, QUIET_COLOUR, 8, ha="left", va="bottom")
            free = pen.x(span.start + pen.seconds(text_points(span.name, 8)))


def _draw_bands(pen: Pen, spans: list[Span], top: float, bottom: float) -> None:
    pen.boxes(analysis.hidden_intervals(spans), top, tint(HIDDEN_COLOUR, 0.4), bottom - top, zorder=0.5)
    pen.boxes(analysis.exposed_intervals(spans), top, tint(EXPOSED_COLOUR, 0.15), bottom - top, zorder=0.5)


def _draw_compute(pen: Pen, spans: list[Span], top: float, colour: str, explain: bool) -> None:
    for name, strength in PHASES.items():
        fill = tint(colour, strength)
        times = [(span.start, span.end) for span in spans if span.name == name]
        pen.boxes(times, top, fill)
        fits = [pen.label(time, top, name, readable_on(fill)) for time in times]
        if times and not any(fits) and explain and name == "optimizer":
            pen.text(times[-1][1], top - 0.08, name, QUIET_COLOUR, 8, ha="right", va="bottom")
    for time in ((span.start, span.end) for span in spans if span.lane == INPUT):
        pen.boxes([time], top, "white", hatch="////", edge=QUIET_COLOUR)
        if not pen.label(time, top, "input", TEXT_COLOUR, boxed=True) and explain:
            pen.text(time[0], top - 0.08, "input", QUIET_COLOUR, 8, ha="left", va="bottom")
    for span in spans:
        if span.name == analysis.WAIT:
            pen.label((span.start, span.end), top, "waits", EXPOSED_COLOUR)


def _draw_link(pen: Pen, spans: list[Span], top: float, explain: bool) -> None:
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
    for span, time in on_link:
        _label_sent(pen, span, time, top, hidden, exposed)
    _describe_link(pen, sent, queued, top, explain)


def _describe_link(pen: Pen, sent: list[Span], queued: Sequence[Any], top: float, explain: bool) -> None:
    """In the room before the first transfer: how many and how much. Beside the queue: what the lines are."""
    noun = "bucket" if all(span.detail.startswith("bucket") for span in sent) else "message"
    total = megabytes(sum(span.bytes or 0 for span in sent))
    count = f"{len(sent)} {noun}" + ("s" if len(sent) > 1 else "")
    for summary in (f"{count}, {total}", count):
        if text_points(summary, 9) + 10 < pen.points((pen.origin, sent[0].start)):
            pen.text(pen.origin, top + ROW / 2, summary, QUIET_COLOUR, 9, ha="left", shift=3)
            break
    note = "queued"
    if queued and explain:
        first = min(path[0][0] for path in queued)
        if text_points(note, 7.5) + 6 < pen.points((pen.origin, first)):
            pen.text(first, top - 0.18, note, QUIET_COLOUR, 7.5, ha="right", shift=-3)


def _label_sent(
    pen: Pen,
    span: Span,
    time: analysis.Interval,
    top: float,
    hidden: list[analysis.Interval],
    exposed: list[analysis.Interval],
) -> None:
    """Write how much was sent, in the longer of the hidden and the exposed part."""
    parts = [
        (part[1] - part[0], part, colour)
        for intervals, colour in ((hidden, TEXT_COLOUR), (exposed, "white"))
        for part in analysis.intersect(intervals, [time])
    ]
    if span.bytes is None or not parts:
        return
    _, part, colour = max(parts, key=lambda candidate: candidate[0])
    size = megabytes(span.bytes)
    names = [size, size.split()[0]] if span.name == "all_reduce" else [f"{span.name} {size}", span.name, size]
    for name in names:
        if pen.label(part, top, name, colour):
            return


@dataclass
class _Amount:
    text: str
    colour: str
    bracket: analysis.Interval | None
    half: float

    @property
    def middle(self) -> float:
        return sum(self.bracket) / 2 if self.bracket else 0.0

    @property
    def width(self) -> float:
        return self.bracket[1] - self.bracket[0] if self.bracket else 0.0


def _draw_amounts(pen: Pen, spans: list[Span], top: float) -> None:
    """Below the link: how much was hidden, how much exposed."""
    if not analysis.communication(spans):
        return
    amounts = []
    for word, intervals, colour in (
        ("hidden", analysis.hidden_intervals(spans), HIDDEN_TEXT_COLOUR),
        ("exposed", analysis.exposed_intervals(spans), EXPOSED_COLOUR),
    ):
        shown = _joined([interval for interval in intervals if pen.points(interval) > 2], pen.seconds(16))
        low, high = top + 0.12, top + 0.28
        brackets = [[(start, low), (start, high), (end, high), (end, low)] for start, end in shown]
        pen.lines(brackets, colour, 1.3)
        longest = max(shown, key=lambda interval: interval[1] - interval[0], default=None)
        text = f"{word} {milliseconds(analysis.total(intervals))} ms"
        half = pen.seconds(text_points(text, 9.5, bold=True)) / 2
        amounts.append(_Amount(text, colour, longest, half))
    for amount, middle in zip(amounts, _middles(amounts[0], amounts[1], pen.seconds(8)), strict=True):
        # At the left edge there is nowhere to go but inside.
        middle = max(middle, pen.origin + amount.half)
        pen.text(middle, top + 0.36, amount.text, amount.colour, 9.5, va="top", weight="bold")


def _joined(intervals: list[analysis.Interval], gap: float) -> list[analysis.Interval]:
    """The same, with those joined that lie closer than `gap`: one bracket for many buckets in a row."""
    wider = analysis.merge((start, end + gap) for start, end in intervals)
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
