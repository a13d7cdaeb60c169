"""The timeline of a training step: what each rank computes, what its link carries, what hides behind what.

    timeline(run)                                                  one step, rank by rank
    compare_timelines([small, good, huge], ["1", "4", "1000"])     several runs on one time axis

A run, a simulation and a list of spans are drawn alike. Where the link works while the device computes, the
communication is hidden (pale); where the device has nothing to do but wait for it, it is exposed (strong). A
transfer is drawn from when the last rank launches it: until then the others wait for that rank (grey).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from . import analysis
from .figure import GRID_COLOUR, kind_of, name_kind, new_axes, points, rank_colour, spans_of, styled, tint
from .pen import ROW
from .spans import Span
from .timeline_rows import BESIDE, Rows, draw_rank, rows_of

MOST_RANKS = 4
_INCHES_A_ROW = 0.27


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

    source: a run, a simulation, or a list of spans with `kind`. step: None for that of median length
    (`analysis.median_step`), the one that `run.explain()` speaks of. ranks: which to draw; None for all, or
    a choice of four of many.
    ValueError where there are no spans, or no such step or rank.
    """
    spans, kind = spans_of(source), kind_of(source, kind)
    step = analysis.median_step(spans) if step is None else step
    inside = analysis.effective(analysis.of_step(spans, step))
    chosen = _choice(inside) if ranks is None else list(ranks)
    drawn = [_of_rank(inside, rank) for rank in chosen]
    rows: list[Rows] = []
    for of_rank in drawn:
        rows.append(rows_of(of_rank, rows[-1].top + rows[-1].height if rows else 0.0))
    ax = new_axes(ax, height=1.3 + _INCHES_A_ROW * (rows[-1].top + rows[-1].height), left=1.25, right=0.15)
    origin = min(analysis.window(of_rank)[0] for of_rank in drawn)
    _frame(ax, rows, max(analysis.window(of_rank)[1] for of_rank in drawn) - origin)
    named: set[str] = set()
    for rank, of_rank, its_rows in zip(chosen, drawn, rows, strict=True):
        _name_rank(ax, rank, its_rows)
        draw_rank(ax, of_rank, its_rows, origin, named)
    picked = ranks is None and len(chosen) < len(analysis.ranks(inside))
    ax.set_title(title or _title(chosen, analysis.ranks(spans), step, picked), pad=18)
    name_kind(ax, kind, pad=18)
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
    for spans in map(spans_of, sources):
        its_step = analysis.median_step(spans) if step is None else step
        drawn.append(_of_rank(analysis.effective(analysis.of_step(spans, its_step)), rank))
    rows = [rows_of(of_rank, 0.0) for of_rank in drawn]
    if axes is None:
        axes = _stacked([its_rows.height for its_rows in rows], title)
    if len(axes) != len(sources):
        raise ValueError(f"give one of axes a source: there are {len(sources)} sources and {len(axes)} axes")
    named: set[str] = set()
    lengths = [end - start for start, end in map(analysis.window, drawn)]
    for index, ax in enumerate(axes):
        _frame(ax, [rows[index]], max(lengths))
        fastest = len(lengths) > 1 and lengths[index] == min(lengths)
        origin = analysis.window(drawn[index])[0]
        draw_rank(ax, drawn[index], rows[index], origin, named, fastest=fastest)
        ax.set_title(labels[index], fontsize=10, pad=18)
        name_kind(ax, kinds[index], pad=18)
        if index < len(axes) - 1:
            # Drawn by hand: an axis that shows nothing but its grid takes as long to draw as all the rest.
            ticks = ax.get_xticks()
            across = ax.get_xaxis_transform()
            ax.vlines(ticks, 0, 1, transform=across, color=GRID_COLOUR, linewidth=0.8, zorder=0.1)
            ax.xaxis.set_visible(False)
            ax.spines["bottom"].set_visible(False)
    return list(axes)


def _stacked(heights: Sequence[float], title: str | None) -> list[Axes]:
    """The axes of a new figure, below one another, tall enough for rows of these heights."""
    from matplotlib import pyplot

    above, top, bottom = 0.45, 0.4, 0.55
    panels = [_INCHES_A_ROW * height for height in heights]
    height = top + sum(panels) + above * len(panels) + bottom
    figure = pyplot.figure(figsize=(9, height))
    axes, upper = [], height - top
    for panel in panels:
        upper -= above + panel
        axes.append(figure.add_axes((0.9 / 9, upper / height, (9 - 1.05) / 9, panel / height)))
    figure.text(
        0.12 / 9,
        1 - 0.12 / height,
        title or "One step: what hides behind compute, and what is exposed",
        va="top",
        fontsize=12,
        fontweight="bold",
    )
    return axes


def _of_rank(spans: Sequence[Span], rank: int) -> list[Span]:
    of_rank = [span for span in spans if span.rank == rank]
    if not of_rank:
        found = ", ".join(map(str, analysis.ranks(spans)))
        raise ValueError(f"rank {rank!r} recorded no spans; those that did: {found}")
    return of_rank


def _choice(spans: Sequence[Span]) -> list[int]:
    """The ranks to draw: of many the first, the last, and those that wait least and most."""
    found = analysis.ranks(spans)
    if len(found) <= MOST_RANKS:
        return found
    waits = {rank: analysis.waiting(span for span in spans if span.rank == rank) for rank in found}
    by_wait = sorted(found, key=lambda rank: waits[rank])
    return sorted({found[0], by_wait[0], by_wait[-1], found[-1]})


def _title(chosen: Sequence[int], everyone: Sequence[int], step: int | None, picked: bool) -> str:
    if picked:
        what = "Some ranks" if step is None else f"Training step {step}"
        return f"{what}: the first, the last, the least and the most waiting of {len(everyone)} ranks"
    what = "What happened when" if step is None else f"Training step {step}: what happened when"
    if len(chosen) == 1:
        return f"{what}, rank {chosen[0]}" + (f" of {len(everyone)}" if len(everyone) > 1 else "")
    if len(chosen) == len(everyone):
        return f"{what}, {'both' if len(chosen) == 2 else f'all {len(chosen)}'} ranks"
    return f"{what}, ranks {', '.join(map(str, chosen))} of {len(everyone)}"


def _frame(ax: Axes, rows: Sequence[Rows], seconds: float) -> None:
    """Axes and row names. Room is left beside the longest step for its length."""
    beside = 1 - BESIDE / max(points(ax)[0], 1.0)
    ax.set_xlim(0, max(seconds, 1e-9) * 1e3 / max(0.5, beside))
    ax.set_ylim(rows[-1].top + rows[-1].height - 0.1, -0.12)
    # Names as plain text, without an axis: tick marks would take longer to draw than the rows.
    ax.yaxis.set_visible(False)
    ax.spines["left"].set_visible(False)
    for y, name in (row for its_rows in rows for row in its_rows.names()):
        across = ax.get_yaxis_transform()
        ax.text(-0.007, y, name, transform=across, ha="right", va="center_baseline", fontsize=9.5)
    ax.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.grid(True)
    ax.set_xlabel("milliseconds since the step began")


def _name_rank(ax: Axes, rank: int, rows: Rows) -> None:
    ax.annotate(
        f"rank {rank}",
        (0, rows.top + ROW / 2),
        xycoords=("axes fraction", "data"),
        xytext=(-84, 0),
        textcoords="offset points",
        va="center_baseline",
        fontweight="bold",
        color=tint(rank_colour(rank), 1.15),
        annotation_clip=False,
    )
