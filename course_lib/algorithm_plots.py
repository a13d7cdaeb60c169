"""Figures that compare algorithms of one collective: their times, and the bytes on each rank's link.

    algorithms(sizes, measured, formulas)    seconds of each, formula lines behind the points
    link_bytes({"star": [...], "ring": [...]}, …)    what each rank sent

They follow the workbook's style (see `plots`): direct labels, and the kind of every number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from .figure import (
    QUIET_COLOUR,
    TEXT_COLOUR,
    kind_of,
    milliseconds,
    name_kind,
    new_axes,
    rank_colour,
    styled,
)
from .ring_picture import decimal_bytes

# One look for each algorithm in every figure; the marker tells them apart without colour.
LOOKS = {
    "star": ("#882255", "s"),
    "tree": ("#999933", "^"),
    "ring": ("#0072B2", "o"),
    "halving-doubling": ("#009E73", "D"),
}
_OTHER_LOOKS = (("#332288", "v"), ("#CC79A7", "P"), ("#56B4E9", "X"))

Times = Sequence[float | Sequence[float]]


def look(name: str, names: Sequence[str]) -> tuple[str, str]:
    """The colour and marker of an algorithm; `names` are all of the figure, for those without their own."""
    if name in LOOKS:
        return LOOKS[name]
    others = [other for other in names if other not in LOOKS]
    return _OTHER_LOOKS[others.index(name) % len(_OTHER_LOOKS)]


@styled
def algorithms(
    x: Sequence[float],
    measured: Mapping[str, Times],
    formulas: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    ax: Axes | None = None,
    *,
    kind: str = "measured",
    x_label: str = "size of the tensor",
    over_bytes: bool = True,
    mark: tuple[float, str] | None = None,
    title: str = "Seconds of an all-reduce",
) -> Axes:
    """Draw seconds over sizes (or ranks) for several algorithms: points measured, lines by formula.

    x: where `measured` was taken, above 0. measured: for each algorithm the seconds at each x, or a list of
    samples, of which the median is drawn. formulas: for each algorithm the x and the seconds of its line.
    kind: what the points are. over_bytes: x is bytes, and both axes are logarithmic; else both are linear.
    mark: an x and what to say there, such as where two lines cross.
    """
    kind = kind_of(None, kind)
    if not formulas:
        raise ValueError("formulas is empty: give the line of at least one algorithm")
    ax = new_axes(ax, height=4.2, left=0.8, right=1.55, top=0.55, bottom=0.65)
    names = list(dict.fromkeys([*formulas, *measured]))
    ends = []
    for name, (at, seconds) in formulas.items():
        line = [1e3 * value for value in seconds]
        ax.plot(at, line, color=look(name, names)[0], linewidth=1.8, alpha=0.75, zorder=2)
        ends.append((line[-1], name))
    for name, points in measured.items():
        if len(points) != len(x):
            raise ValueError(f"measured[{name!r}] has {len(points)} values for {len(x)} places on x")
        middle = [1e3 * _median(point) for point in points]
        colour, marker = look(name, names)
        ax.plot(x, middle, marker, color=colour, markersize=7, zorder=3, markeredgecolor="white")
    if over_bytes:
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(list(x), [decimal_bytes(size) for size in x])
        ticks = _round_numbers(*ax.get_ylim())
        ax.set_yticks(ticks, [milliseconds(value / 1e3) for value in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.set_ylim(bottom=0)
        at = sorted({value for line_x, _ in formulas.values() for value in line_x} | set(x))
        ax.set_xticks(at, [f"{value:g}" for value in at])
    ax.yaxis.grid(True)
    if mark is not None:
        ax.axvline(mark[0], color=TEXT_COLOUR, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
        ax.annotate(
            mark[1], (mark[0], 1), xycoords=("data", "axes fraction"), xytext=(-5, -3),
            textcoords="offset points", va="top", ha="right", fontsize=9, fontweight="bold",
        )  # fmt: skip
    _label_ends(ax, ends, names)
    ax.set_xlabel(f"{x_label} (log scale)" if over_bytes else x_label)
    ax.set_ylabel("milliseconds (log scale)" if over_bytes else "milliseconds")
    ax.set_title(title)
    name_kind(ax, f"— formula     ● {kind}" if measured else "— formula")
    return ax


def _median(point: float | Sequence[float]) -> float:
    return point if isinstance(point, int | float) else statistics.median(point)


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two ends."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    numbers = (digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5))
    return [number for number in numbers if low <= number <= high]


def _label_ends(ax: Axes, ends: list[tuple[float, str]], names: Sequence[str]) -> None:
    """Write each line's name at its right end, moved apart where two would touch."""
    height, least = ax.get_window_extent().height / ax.figure.dpi * 72, -math.inf
    for value, name in sorted(ends):
        share = ax.transAxes.inverted().transform(ax.transData.transform((ax.get_xlim()[0], value)))[1]
        place = max(share * height, least + 13)
        least = place
        ax.annotate(
            name, (1, 0), xycoords="axes fraction", xytext=(8, place), textcoords="offset points",
            va="center", color=look(name, names)[0], fontsize=10, fontweight="bold",
        )  # fmt: skip


@styled
def link_bytes(
    sent: Mapping[str, Sequence[float]],
    ax: Axes | None = None,
    *,
    expected: Mapping[str, float] | None = None,
    kind: str = "measured",
    title: str = "What each rank sent",
) -> Axes:
    """Draw the bytes that each rank sent, as a group of bars for each algorithm, one bar a rank.

    sent: for each algorithm the bytes by rank. expected: for some of them a level to mark across the group,
    such as 2(n-1)/n of the data.
    """
    kind = kind_of(None, kind)
    if not sent:
        raise ValueError("sent is empty: give the bytes by rank of at least one algorithm")
    ax = new_axes(ax, height=3.4, left=0.9, right=0.3, top=0.55, bottom=0.5)
    top = max(max(by_rank) for by_rank in sent.values()) or 1.0
    left, middles = 0.0, []
    for name, by_rank in sent.items():
        for rank, size in enumerate(by_rank):
            ax.bar(left + rank, size / 1e6, 0.84, color=rank_colour(rank))
            _centred(ax, left + rank, -0.03 * top / 1e6, f"{rank}", va="top", color=QUIET_COLOUR)
            if len(set(by_rank)) > 1:
                _centred(ax, left + rank, (size + 0.012 * top) / 1e6, f"{size / 1e6:.3g}")
        if len(set(by_rank)) == 1:
            middle, height = left + (len(by_rank) - 1) / 2, (by_rank[0] + 0.03 * top) / 1e6
            each = f"{by_rank[0] / 1e6:.3g} each"
            _centred(ax, middle, height, each)
        level = (expected or {}).get(name)
        if level is not None:
            ends = [left - 0.5, left + len(by_rank) - 0.5]
            ax.plot(ends, [level / 1e6] * 2, color=TEXT_COLOUR, linewidth=1.2, linestyle="--", zorder=4)
        middles.append(left + (len(by_rank) - 1) / 2)
        left += len(by_rank) + 1.2
    ax.set_xticks(middles, [f"\n{name}, by rank" for name in sent])
    ax.tick_params(axis="x", length=0)
    ax.set_ylim(0, 1.15 * top / 1e6)
    ax.set_ylabel("MB sent")
    ax.set_title(title)
    marked = "     - - formula" if expected else ""
    name_kind(ax, f"{kind} (counted){marked}")
    return ax


def _centred(ax: Axes, x: float, y: float, words: str, va: str = "bottom", color: str = TEXT_COLOUR) -> None:
    ax.text(x, y, words, ha="center", va=va, fontsize=9, color=color)
