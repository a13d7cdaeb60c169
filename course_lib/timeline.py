"""The timeline of a training step: what each rank computes, what its link carries, what hides behind what.

    timeline(run)                                                     one step, rank by rank
    compare_timelines([small, good, huge], ["1 MiB", "4 MiB", "1000 MiB"])    several runs on one time axis

A run, a simulation and a list of spans are drawn alike. Where the link works while the device computes, the
communication is hidden (pale); where the device has nothing to do but wait for it, it is exposed (strong).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from . import analysis
from .figure import (
    EXPOSED_COLOUR,
    HIDDEN_COLOUR,
    HIDDEN_TEXT_COLOUR,
    NEUTRAL_COLOUR,
    QUIET_COLOUR,
    TEXT_COLOUR,
    kind_of,
    megabytes,
    milliseconds,
    name_kind,
    new_axes,
    points,
    rank_colour,
    readable_on,
    spans_of,
    styled,
    text_points,
    tint,
)
from .spans import INPUT, LINK, Span

MOST_RANKS = 4
# How light or dark a rank's colour is for each phase.
PHASES = {"forward": 0.4, "backward": 1.0, "optimizer": 1.5}
_ROW, _GAP, _BELOW = 1.0, 0.32, 1.15
_INCHES_A_UNIT = 0.27


@styled
def timeline(
    source: Any,
    ax: Axes | None = None,
    *,
    kind: str | None = None,
    step: int | None = None,
    ranks: Sequence[int] | None = None,
    title: str | None = None,
) -> Axes:
    """Draw one training step: a row of compute and a row of link for each rank.

    source: a run, a simulation, or a list of spans with `kind`. step: None for one of median length, the
    first left out (`analysis.median_step`). ranks: which to draw; None for all, or a choice of four of many.
    ValueError where there are no spans, or no such step or rank.
    """
    spans, kind = spans_of(source), kind_of(source, kind)
    everyone = analysis.ranks(spans)
    step = analysis.median_step(spans) if step is None else step
    chosen = _choice(spans, step) if ranks is None else list(ranks)
    drawn = {rank: _of(spans, rank, step) for rank in chosen}
    rows = _rows(drawn.values())
    ax = new_axes(ax, height=1.35 + _INCHES_A_UNIT * rows["height"] * len(chosen), left=1.25, right=0.15)
    origin = min(analysis.window(of_rank)[0] for of_rank in drawn.values())
    _frame(ax, rows, chosen, max(analysis.window(of_rank)[1] for of_rank in drawn.values()) - origin)
    for index, rank in enumerate(chosen):
        _draw_rank(ax, drawn[rank], rows, index * rows["height"], origin, index == 0)
    ax.set_title(title or _title(chosen, everyone, step))
    name_kind(ax, kind)
    return ax


@styled
def compare_timelines(
    sources: Sequence[Any],
    labels: Sequence[str],
    *,
    rank: int = 0,
    step: int | None = None,
    title: str | None = None,
    axes: Sequence[Axes] | None = None,
) -> list[Axes]:
    """Draw one step of several runs or simulations below one another, on one time axis.

    labels: what tells the runs apart, one each. rank: whose step to draw. step: None for the median step of
    each. axes: one for each source; None for a new figure. ValueError as for `timeline`.
    """
    if not sources or len(sources) != len(labels):
        raise ValueError(
            f"give one label a source: there are {len(sources)} sources and {len(labels)} labels"
        )
    kinds = [kind_of(source, None) for source in sources]
    drawn = []
    for source in sources:
        spans = spans_of(source)
        drawn.append(_of(spans, rank, analysis.median_step(spans, rank) if step is None else step))
    rows = _rows(drawn)
    if axes is None:
        axes = _stacked(len(sources), 0.42 + _INCHES_A_UNIT * rows["height"], title)
    if len(axes) != len(sources):
        raise ValueError(f"give one of axes a source: there are {len(sources)} sources and {len(axes)} axes")
    lengths = [end - start for start, end in map(analysis.window, drawn)]
    for ax, of_rank, label, kind, length in zip(axes, drawn, labels, kinds, lengths, strict=True):
        _frame(ax, rows, None, max(lengths))
        fastest = len(lengths) > 1 and length == min(lengths)
        _draw_rank(ax, of_rank, rows, 0.0, analysis.window(of_rank)[0], ax is axes[0], fastest)
        ax.set_title(label, fontsize=10, pad=9)
        name_kind(ax, kind, pad=9)
        if ax is not axes[-1]:
            ax.tick_params(labelbottom=False)
            ax.set_xlabel("")
    return list(axes)


def _stacked(count: int, panel: float, title: str | None) -> list[Axes]:
    from matplotlib import pyplot

    top, bottom = 0.42, 0.55
    height = top + count * panel + bottom
    figure = pyplot.figure(figsize=(9, height))
    axes = []
    for index in range(count):
        lower = bottom + (count - 1 - index) * panel
        axes.append(figure.add_axes((0.9 / 9, lower / height, (9 - 1.05) / 9, (panel - 0.42) / height)))
    figure.text(
        0.1 / 9,
        1 - 0.1 / height,
        title or "One step: what hides behind compute, and what is exposed",
        va="top",
        fontsize=12,
        fontweight="bold",
    )
    return axes


def _of(spans: Sequence[Span], rank: int, step: int | None) -> list[Span]:
    of_rank = [span for span in spans if span.rank == rank]
    if not of_rank:
        found = ", ".join(map(str, analysis.ranks(spans)))
        raise ValueError(f"rank {rank!r} recorded no spans; those that did: {found}")
    return analysis.of_step(of_rank, step)


def _choice(spans: Sequence[Span], step: int | None) -> list[int]:
    """The ranks to draw: of many the first, the last, and those that wait least and most for the others."""
    inside = analysis.of_step(spans, step)
    found = analysis.ranks(inside)
    if len(found) <= MOST_RANKS:
        return found
    waits = {rank: analysis.exposed(span for span in inside if span.rank == rank) for rank in found}
    by_wait = sorted(found, key=lambda rank: waits[rank])
    picked: list[int] = []
    for rank in (found[0], by_wait[0], by_wait[-1], found[-1], *found):
        if rank not in picked and len(picked) < MOST_RANKS:
            picked.append(rank)
    return sorted(picked)


def _title(chosen: Sequence[int], everyone: Sequence[int], step: int | None) -> str:
    what = "What happened when" if step is None else f"Training step {step}"
    if len(chosen) == len(everyone):
        return f"{what}, {'rank ' + str(chosen[0]) if len(chosen) == 1 else f'all {len(chosen)} ranks'}"
    plural = "s" if len(chosen) > 1 else ""
    return f"{what}, rank{plural} {', '.join(map(str, chosen))} of {len(everyone)}"


def _own(spans: Sequence[Span]) -> list[Span]:
    known = (*analysis.COMPUTE_NAMES, analysis.WAIT)
    return [span for span in spans if span.lane not in (LINK, INPUT) and span.name not in known]


def _rows(groups: Any) -> dict[str, float]:
    """Where each row of a rank begins, and the height of all; a row that nobody needs is left out."""
    groups = list(groups)
    rows: dict[str, float] = {}
    y = 0.0
    if any(_own(spans) for spans in groups):
        rows["own"] = y
        y += _ROW + _GAP
    if any(len(_own(spans)) < len(spans) for spans in groups):
        rows["compute"], rows["link"] = y, y + _ROW + _GAP
        y += 2 * _ROW + _GAP + _BELOW
    return rows | {"height": y}


def _frame(ax: Axes, rows: dict[str, float], ranks: Sequence[int] | None, seconds: float) -> None:
    """Axes and row names. Room is left beside the longest step for its length."""
    width = max(points(ax)[0], 1.0)
    ax.set_xlim(0, max(seconds, 1e-9) * 1e3 / max(0.5, 1 - 62 / width))
    count = len(ranks) if ranks is not None else 1
    ax.set_ylim(rows["height"] * count - 0.15, -0.12)
    ticks, names = [], []
    for index in range(count):
        for row in ("own", "compute", "link"):
            if row in rows:
                ticks.append(index * rows["height"] + rows[row] + _ROW / 2)
                names.append("yours" if row == "own" else row)
    ax.set_yticks(ticks, names)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("milliseconds since the step began")
    for index, rank in enumerate(ranks or ()):
        y = index * rows["height"] + _ROW / 2
        ax.annotate(
            f"rank {rank}",
            (0, y),
            xycoords=("axes fraction", "data"),
            xytext=(-84, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
            color=tint(rank_colour(rank), 1.15),
            annotation_clip=False,
        )


def _draw_rank(
    ax: Axes,
    spans: list[Span],
    rows: dict[str, float],
    top: float,
    origin: float,
    first: bool,
    fastest: bool = False,
) -> None:
    colour = rank_colour(spans[0].rank)
    pen = _Pen(ax, origin)
    for span in sorted(_own(spans), key=lambda span: -span.seconds):
        pen.boxes([(span.start, span.end)], top + rows["own"], NEUTRAL_COLOUR)
        pen.label((span.start, span.end), top + rows["own"], span.name, TEXT_COLOUR)
    if "compute" in rows:
        _draw_bands(pen, spans, top + rows["compute"], top + rows["link"] + _ROW)
        _draw_compute(pen, spans, top + rows["compute"], colour, first)
        _draw_link(pen, spans, top + rows["link"])
        _draw_brackets(pen, spans, top + rows["link"] + _ROW)
    start, end = analysis.window(spans)
    bottom = top + (rows["link"] + _ROW if "link" in rows else rows["own"] + _ROW)
    pen.lines([[(end, top - 0.05), (end, bottom + 0.1)]], TEXT_COLOUR, 1.2)
    text = f"{milliseconds(end - start)} ms" + ("\nfastest" if fastest else "")
    pen.text(end, (top + bottom) / 2, text, TEXT_COLOUR, 10, ha="left", shift=5, weight="bold")


def _draw_bands(pen: _Pen, spans: list[Span], top: float, bottom: float) -> None:
    pen.boxes(analysis.hidden_intervals(spans), top, tint(HIDDEN_COLOUR, 0.4), bottom - top, zorder=0.5)
    pen.boxes(analysis.exposed_intervals(spans), top, tint(EXPOSED_COLOUR, 0.15), bottom - top, zorder=0.5)


def _draw_compute(pen: _Pen, spans: list[Span], top: float, colour: str, first: bool) -> None:
    for name, strength in PHASES.items():
        fill = tint(colour, strength)
        times = [(span.start, span.end) for span in spans if span.name == name]
        pen.boxes(times, top, fill)
        for time in times:
            if not pen.label(time, top, name, readable_on(fill)) and first and name == "optimizer":
                pen.text(time[1], top - 0.1, name, QUIET_COLOUR, 8, ha="right", va="bottom")
    for span in spans:
        if span.lane == INPUT:
            pen.boxes([(span.start, span.end)], top, "white", hatch="////", edge=QUIET_COLOUR)
            if not pen.label((span.start, span.end), top, span.name, TEXT_COLOUR, boxed=True) and first:
                pen.text(span.start, top - 0.1, span.name, QUIET_COLOUR, 8, ha="left", va="bottom")
        elif span.name == analysis.WAIT:
            pen.label((span.start, span.end), top, "waits", EXPOSED_COLOUR)


def _draw_link(pen: _Pen, spans: list[Span], top: float) -> None:
    sent = sorted((span for span in spans if span.lane == LINK), key=lambda span: (span.start, span.end))
    if not sent:
        pen.text(pen.origin, top + _ROW / 2, "nothing sent", QUIET_COLOUR, 9, ha="left", shift=4)
        return
    hidden, exposed = analysis.hidden_intervals(spans), analysis.exposed_intervals(spans)
    free = sent[0].start
    queued, borders, on_link = [], [], []
    for span in sent:
        # In flight at once, they share one link: each is drawn from when the one before is through.
        begins = max(span.start, free)
        if begins - span.start > pen.seconds(2):
            queued += [
                [(span.start, top - 0.2), (span.start, top - 0.02)],
                [(span.start, top - 0.11), (begins, top - 0.11)],
            ]
        if span.end > begins:
            on_link.append((span, (begins, span.end)))
            borders.append([(begins, top), (begins, top + _ROW)])
        free = max(free, span.end)
    pen.boxes(analysis.intersect(hidden, [time for _, time in on_link]), top, HIDDEN_COLOUR)
    pen.boxes(analysis.intersect(exposed, [time for _, time in on_link]), top, EXPOSED_COLOUR)
    pen.lines(borders, "white", 1.0)
    pen.lines(queued, QUIET_COLOUR, 0.8)
    for span, time in on_link:
        _label_bucket(pen, span, time, top, hidden, exposed)
    total = megabytes(sum(span.bytes or 0 for span in sent))
    noun = "bucket" if all(span.detail.startswith("bucket") for span in sent) else "message"
    summary = f"1 {noun}" if len(sent) == 1 else f"{len(sent)} {noun}s, {total}"
    if text_points(summary, 9) + 12 < pen.points((pen.origin, sent[0].start)):
        pen.text(pen.origin, top + _ROW / 2, summary, QUIET_COLOUR, 9, ha="left", shift=2)


def _label_bucket(
    pen: _Pen,
    span: Span,
    time: analysis.Interval,
    top: float,
    hidden: list[analysis.Interval],
    exposed: list[analysis.Interval],
) -> None:
    """Write a bucket's size in the longer of its hidden and its exposed part."""
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


def _draw_brackets(pen: _Pen, spans: list[Span], top: float) -> None:
    """Below the link: how much was hidden, how much exposed."""
    if not analysis.communication(spans):
        return
    labels = []
    for word, intervals, colour in (
        ("hidden", analysis.hidden_intervals(spans), HIDDEN_TEXT_COLOUR),
        ("exposed", analysis.exposed_intervals(spans), EXPOSED_COLOUR),
    ):
        shown = [interval for interval in intervals if pen.points(interval) > 2]
        for start, end in shown:
            low, high = top + 0.12, top + 0.28
            pen.lines([[(start, low), (start, high), (end, high), (end, low)]], colour, 1.3)
        text = f"{word} {milliseconds(analysis.total(intervals))} ms"
        longest = max(shown, key=lambda interval: interval[1] - interval[0], default=None)
        middle = sum(longest) / 2 if longest else None
        labels.append([middle, text, colour, pen.seconds(text_points(text, 9.5)) / 2])
    for own, other in ((0, 1), (1, 0)):
        if labels[own][0] is None:
            # Nothing of this kind to point at: beside where it would be.
            beside = labels[other][3] + labels[own][3] + pen.seconds(8)
            labels[own][0] = (labels[other][0] or 0.0) + (beside if own else -beside)
    (left, _, _, left_half), (right, _, _, right_half) = labels
    overlap = left_half + right_half + pen.seconds(8) - abs(right - left)
    if overlap > 0:
        sign = 1 if right >= left else -1
        labels[0][0] -= sign * overlap / 2
        labels[1][0] += sign * overlap / 2
    for middle, text, colour, _ in labels:
        pen.text(middle, top + 0.36, text, colour, 9.5, va="top", weight="bold")


class _Pen:
    """Draws in seconds of the run's clock and units of rows, and knows what fits."""

    def __init__(self, ax: Axes, origin: float):
        self.ax, self.origin = ax, origin
        self.points_a_second = points(ax)[0] / (ax.get_xlim()[1] / 1e3)

    def x(self, seconds: float) -> float:
        return (seconds - self.origin) * 1e3

    def points(self, interval: analysis.Interval) -> float:
        return (interval[1] - interval[0]) * self.points_a_second

    def seconds(self, width: float) -> float:
        return width / self.points_a_second

    def boxes(
        self,
        intervals: Sequence[analysis.Interval],
        top: float,
        colour: Any,
        height: float = _ROW,
        *,
        zorder: float = 2.0,
        hatch: str | None = None,
        edge: str = "none",
    ) -> None:
        if intervals:
            bars = [(self.x(start), (end - start) * 1e3) for start, end in intervals]
            self.ax.broken_barh(
                bars,
                (top, height),
                facecolor=colour,
                edgecolor=edge,
                linewidth=0.6,
                hatch=hatch,
                zorder=zorder,
            )

    def lines(self, paths: Sequence[Sequence[tuple[float, float]]], colour: str, width: float) -> None:
        paths = [[(self.x(seconds), y) for seconds, y in path] for path in paths]
        self.ax.add_collection(
            LineCollection(paths, colors=colour, linewidths=width, zorder=3), autolim=False
        )

    def label(
        self, interval: analysis.Interval, top: float, text: str, colour: str, *, boxed: bool = False
    ) -> bool:
        """Write `text` inside a box; False, and nothing written, where it does not fit."""
        if text_points(text, 9) + 4 > self.points(interval):
            return False
        background = {"facecolor": "white", "edgecolor": "none", "pad": 1} if boxed else None
        self.text(sum(interval) / 2, top + _ROW / 2, text, colour, 9, bbox=background)
        return True

    def text(
        self,
        seconds: float,
        y: float,
        text: str,
        colour: str,
        size: float,
        *,
        ha: str = "center",
        va: str = "center_baseline",
        shift: float = 0.0,
        weight: str = "normal",
        bbox: dict[str, Any] | None = None,
    ) -> None:
        self.ax.text(
            self.x(seconds + self.seconds(shift)),
            y,
            text,
            color=colour,
            fontsize=size,
            ha=ha,
            va=va,
            fontweight=weight,
            bbox=bbox,
            zorder=4,
        )
