"""The rows of one rank on a timeline: your own spans, and what it computes and waits for; then its link.

`timeline` decides what stands where; here it is drawn. Spans are those of `analysis.effective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from . import analysis
from .figure import (
    EXPOSED_COLOUR,
    HIDDEN_COLOUR,
    NEUTRAL_COLOUR,
    QUIET_COLOUR,
    TEXT_COLOUR,
    WAITING_COLOUR,
    milliseconds,
    rank_colour,
    readable_on,
    text_points,
    tint,
)
from .intervals import Interval, intersect, subtract
from .pen import ROW, Pen
from .spans import INPUT, Span
from .timeline_link import draw_amounts, draw_link

# How light or dark a rank's colour is for each phase.
PHASES = {"forward": 0.4, "backward": 1.0, "optimizer": 1.5}
GAP, BELOW = 0.46, 1.15  # rows between two rows of a rank, and below its link
BELOW_OWN = 0.8  # rows below your own spans, where the names of narrow phases stand
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


def rows_of(spans: Sequence[Span], top: float) -> Rows:
    """The rows that these spans of one rank need, from `top` down."""
    number = len(analysis.own_spans(spans))
    own = top if number else None
    if number == len(spans):
        return Rows(top, own, None, None, top + ROW, ROW + GAP)
    compute = top + ROW + BELOW_OWN if number else top
    link = compute + ROW + GAP
    return Rows(top, own, compute, link, link + ROW, link + ROW + BELOW - top)


def draw_rank(
    ax: Axes, spans: list[Span], rows: Rows, origin: float, named: set[str], *, fastest: bool = False
) -> None:
    """Draw the spans of one rank. named: what the figure has named already; what is new is named here."""
    colour = rank_colour(spans[0].rank)
    pen = Pen(ax, origin)
    if rows.own is not None:
        _draw_own(pen, analysis.own_spans(spans), rows.own)
    if rows.compute is not None and rows.link is not None:
        _draw_bands(pen, spans, rows.compute, rows.link + ROW)
        narrow = _draw_compute(pen, spans, rows.compute, colour, named)
        narrow += _draw_waiting(pen, spans, rows.compute, named)
        _name_narrow(pen, narrow, rows.compute, above=not rows.top or rows.own is not None)
        draw_link(pen, spans, rows.link, named)
        draw_amounts(pen, spans, rows.link + ROW)
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
        seen = subtract([(span.start, span.end)], inner)
        widest = max(seen, key=lambda part: part[1] - part[0], default=(span.start, span.start))
        if not pen.label(widest, top, span.name, TEXT_COLOUR) and pen.x(span.start) > free:
            pen.text(span.start, top - 0.06, span.name, QUIET_COLOUR, 8, ha="left", va="bottom")
            free = pen.x(span.start + pen.seconds(text_points(span.name, 8)))


def _draw_bands(pen: Pen, spans: list[Span], top: float, bottom: float) -> None:
    pen.boxes(analysis.hidden_intervals(spans), top, tint(HIDDEN_COLOUR, 0.4), bottom - top, zorder=0.5)
    pen.boxes(analysis.exposed_intervals(spans), top, tint(EXPOSED_COLOUR, 0.15), bottom - top, zorder=0.5)


def _draw_compute(
    pen: Pen, spans: list[Span], top: float, colour: str, named: set[str]
) -> list[tuple[float, str]]:
    """Draw the phases and the input; returns when and what is new in the figure and too narrow for a name."""
    narrow = []
    for name in (INPUT, *PHASES):
        if name == INPUT:
            times = [_time(span) for span in spans if span.lane == INPUT]
            pen.boxes(times, top, "white", hatch="////", edge=QUIET_COLOUR)
            fits = [pen.label(time, top, name, TEXT_COLOUR, boxed=True) for time in times]
        else:
            fill = tint(colour, PHASES[name])
            times = [_time(span) for span in spans if span.name == name]
            pen.boxes(times, top, fill)
            fits = [pen.label(time, top, name, readable_on(fill)) for time in times]
        if times and name not in named:
            named.add(name)
            if not any(fits):
                narrow.append((_middle(max(times, key=_seconds)), name))
    return narrow


def _draw_waiting(pen: Pen, spans: list[Span], top: float, named: set[str]) -> list[tuple[float, str]]:
    """In the row of compute: waiting for other ranks in grey; waiting for the link is named only.

    Returns what is new and too narrow, as `_draw_compute`.
    """
    waits = [span for span in spans if span.lane == analysis.WAITING_LANE]
    fits = False
    for span in waits:
        time = _time(span)
        pen.boxes([time], top, WAITING_COLOUR)
        words = _whom(span)
        fits |= pen.label_first(time, top, [f"{words}, {milliseconds(span.seconds)} ms", words], TEXT_COLOUR)
    narrow = []
    longest_wait = max(waits, key=lambda span: span.seconds, default=None)
    if longest_wait and analysis.WAITING not in named and (fits or pen.points(_time(longest_wait)) > 2):
        named.add(analysis.WAITING)
        narrow = [] if fits else [(_middle(_time(longest_wait)), _whom(longest_wait))]
    inside = analysis.named(spans, analysis.WAIT)
    exposed = analysis.exposed_intervals(spans)
    longest = max(intersect(exposed, inside), key=_seconds, default=None)
    if longest:
        pen.label_first(longest, top, ["waits for the link", "waits"], EXPOSED_COLOUR)
    # What is left of DDP's wait: it hands out what has arrived, or the machine is late to wake it.
    for time in subtract(inside, [*exposed, *map(_time, waits)]):
        pen.boxes([time], top, tint(WAITING_COLOUR, 0.5))
        pen.label(time, top, "finishes", QUIET_COLOUR)
    return narrow


def _whom(span: Span) -> str:
    return f"waits for {span.detail or 'others'}"


def _time(span: Span) -> Interval:
    return span.start, span.end


def _seconds(interval: Interval) -> float:
    return interval[1] - interval[0]


def _middle(interval: Interval) -> float:
    return (interval[0] + interval[1]) / 2


def _name_narrow(pen: Pen, narrow: list[tuple[float, str]], top: float, above: bool) -> None:
    """Name phases beside their boxes, with a line to each: above the row, or below where there is no room."""
    narrow = sorted(narrow)
    halves = [pen.seconds(text_points(name, 8) / 2 + 3) for _, name in narrow]
    middles: list[float] = []
    for index, (middle, _) in enumerate(narrow):
        least = middles[-1] + halves[index - 1] if middles else pen.origin - pen.seconds(3)
        middles.append(max(middle, least + halves[index]))
    edge, end, line = (top, top - 0.3, 0.27) if above else (top + ROW, top + ROW + 0.14, -0.12)
    for (middle, name), placed in zip(narrow, middles, strict=True):
        pen.lines([[(middle, edge), (placed, edge - line)]], QUIET_COLOUR, 0.7)
        pen.text(placed, end, name, TEXT_COLOUR, 8, va="bottom" if above else "top")
