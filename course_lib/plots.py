"""The workbook's figures: each takes data and, if you like, axes, and returns the axes.

    timeline(run)                 what each rank computes and what its link carries, in one step
    compare_timelines(runs, …)    the same of several runs, on one time axis
    breakdown(run)                where the time of a step went
    sweep(caps, samples, …)       a step's time over a setting, the simulator's line behind the points

Every figure names what its numbers are: measured, paced, modelled or published.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from . import analysis
from .figure import (
    EXPOSED_COLOUR,
    NEUTRAL_COLOUR,
    QUIET_COLOUR,
    TEXT_COLOUR,
    WAITING_COLOUR,
    kind_of,
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
from .timeline import compare_timelines, timeline
from .timeline_rows import PHASES

__all__ = ["breakdown", "compare_timelines", "sweep", "timeline"]

_SWEEP_COLOUR = "#0072B2"
_MARKS = 0.27  # the part of a sweep's height that the marks of the best points need
_BROKEN = {analysis.EXPOSED: "exposed\ncommunication", analysis.WAITING: "waiting for\nother ranks"}
Samples = float | Sequence[float]


@styled
def breakdown(
    source: Any,
    ax: Axes | None = None,
    *,
    kind: str | None = None,
    rank: int = 0,
    step: int | None = None,
    title: str | None = None,
) -> Axes:
    """Draw where the time of one rank's step went, as one bar, in ms and percent.

    source: a run, a simulation, or a list of spans with `kind`. step: None for that of median length,
    as in `timeline`. The parts are those of `analysis.step_breakdown`. ValueError where there are no spans.
    """
    spans, kind = spans_of(source), kind_of(source, kind)
    step = analysis.median_step(spans) if step is None else step
    parts = {
        name: seconds for name, seconds in analysis.step_breakdown(spans, rank, step).items() if seconds > 0
    }
    whole = sum(parts.values())
    if not whole > 0:
        raise ValueError(f"rank {rank}'s spans last no time: there is nothing to break down")
    ax = new_axes(ax, height=2.15, left=0.3, right=0.3, top=0.5, bottom=0.55)
    ax.set_xlim(0, whole * 1e3)
    ax.set_ylim(1.75, 0)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("milliseconds of the step")
    a_point = whole * 1e3 / points(ax)[0]
    narrow = []
    left = 0.0
    for name, seconds in parts.items():
        width = seconds * 1e3
        fill = _part_colour(name, rank)
        hatch = "////" if name == "input" else None
        edge = QUIET_COLOUR if name == "input" else "white"
        ax.barh(0.5, width, 0.85, left, color=fill, edgecolor=edge, linewidth=0.8, hatch=hatch)
        amount = f"{milliseconds(seconds)} ms, {_percent(seconds / whole)}"
        short = _BROKEN.get(name, name)
        for label in (f"{name}\n{amount}", f"{short}\n{amount}"):
            if (text_points(label, 9.5) + 6) * a_point <= width:
                background = {"facecolor": "white", "edgecolor": "none", "pad": 1.5} if hatch else None
                ax.text(
                    left + width / 2, 0.5, label, ha="center", va="center", fontsize=9.5,
                    color=readable_on(fill), bbox=background,
                )  # fmt: skip
                break
        else:
            narrow.append((left + width / 2, f"{name}\n{amount}", fill))
        left += width
    _label_below(ax, narrow, whole * 1e3, a_point)
    where = f"rank {rank}" if step is None else f"rank {rank}, step {step}"
    ax.set_title(title or f"Where the {milliseconds(whole)} ms of a step went ({where})")
    name_kind(ax, kind)
    return ax


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.005 else "< 1 %"


def _part_colour(name: str, rank: int) -> Any:
    if name in PHASES:
        return tint(rank_colour(rank), PHASES[name])
    special = {
        "input": "white",
        analysis.EXPOSED: EXPOSED_COLOUR,
        analysis.WAITING: WAITING_COLOUR,
        analysis.OTHER: "#F4F4F4",
    }
    return special.get(name, NEUTRAL_COLOUR)


def _label_below(ax: Axes, narrow: list[tuple[float, str, Any]], width: float, a_point: float) -> None:
    """Name the parts that are too narrow for a name inside: below them, moved apart, with a line to each."""
    halves = [text_points(label, 9) * a_point / 2 + 4 * a_point for _, label, _ in narrow]
    middles: list[float] = []
    for (middle, _, _), half in zip(narrow, halves, strict=True):
        least = middles[-1] + halves[len(middles) - 1] + half if middles else half
        middles.append(max(middle, least))
    most = width
    for index in reversed(range(len(middles))):
        middles[index] = min(middles[index], most - halves[index])
        most = middles[index] - halves[index]
    for (middle, label, _), placed in zip(narrow, middles, strict=True):
        ax.plot([middle, middle, placed], [0.93, 1.02, 1.14], color=QUIET_COLOUR, linewidth=0.8)
        ax.text(placed, 1.17, label, ha="center", va="top", fontsize=9, color=TEXT_COLOUR)


@styled
def sweep(
    x: Sequence[float],
    measured: Sequence[Samples] | None = None,
    modelled: Sequence[float] | None = None,
    ax: Axes | None = None,
    *,
    kind: str = "measured",
    modelled_x: Sequence[float] | None = None,
    prediction: float | None = None,
    x_label: str = "bucket_cap_mb",
    x_unit: str = "MiB",
    y_label: str = "milliseconds a step",
    title: str | None = None,
) -> Axes:
    """Draw a step's time over a setting, on a logarithmic axis, and mark the best.

    x: the settings, above 0. measured: for each the seconds, or a list of samples, of which the median is
    drawn with a line from least to most. modelled: the simulator's seconds, for each of `modelled_x` (None:
    of `x`). kind: what `measured` is. prediction: the setting that the reader thought best.
    """
    kind = kind_of(None, kind)
    settings = _positive("x", x)
    if measured is None and modelled is None:
        raise ValueError("give measured, modelled or both: there is nothing to draw")
    ax = new_axes(ax, height=3.9, left=0.85, right=0.3, top=0.55, bottom=0.65)
    series: list[tuple[str, float, float]] = []
    heights: list[float] = []
    lines_x = settings if modelled_x is None else _positive("modelled_x", modelled_x)
    if modelled is not None:
        _same_length("modelled", modelled, lines_x)
        line = [seconds * 1e3 for seconds in modelled]
        ax.plot(lines_x, line, color=tint(_SWEEP_COLOUR, 0.45), linewidth=2.2, zorder=2)
        series.append(("modelled", *_least(lines_x, line)))
        heights += line
    if measured is not None:
        _same_length("measured", measured, settings)
        samples = [_in_milliseconds(point) for point in measured]
        medians = [statistics.median(point) for point in samples]
        ax.vlines(
            settings, list(map(min, samples)), list(map(max, samples)), color=_SWEEP_COLOUR, linewidth=1.4
        )
        ax.plot(settings, medians, "o", color=_SWEEP_COLOUR, markersize=6, zorder=3)
        series.append((kind, *_least(settings, medians)))
        heights += [value for point in samples for value in point]
    _sweep_axes(ax, settings, [*settings, *(lines_x if modelled is not None else [])], heights, prediction)
    _mark_best(ax, series, x_unit, min(heights), prediction)
    ax.set_xlabel(
        f"{x_label} ({x_unit}, log scale)" if x_unit and x_unit not in x_label else f"{x_label} (log scale)"
    )
    cut = ax.get_ylim()[0] > 0
    ax.set_ylabel(f"{y_label}\n(axis starts above 0)" if cut else y_label)
    ax.set_title(title or f"Step time over {x_label}")
    name_kind(
        ax, "     ".join(f"{'—' if name == 'modelled' else '●'} {name}" for name, _, _ in reversed(series))
    )
    return ax


def _sweep_axes(
    ax: Axes, ticks: list[float], everywhere: list[float], heights: list[float], prediction: float | None
) -> None:
    """A log2 axis that is labelled with the real settings, and room for the marks."""
    everywhere = everywhere if prediction is None else [*everywhere, *_positive("prediction", [prediction])]
    ax.set_xscale("log", base=2)
    ax.set_xlim(min(everywhere) / 1.35, max(everywhere) * 1.35)
    every = math.ceil(len(ticks) / 14)
    ax.set_xticks(ticks[::every], [f"{tick:g}" for tick in ticks[::every]])
    ax.xaxis.set_minor_locator(NullLocator())
    _height_axis(ax, min(heights), max(heights))
    if prediction is not None:
        ax.axvline(prediction, color=TEXT_COLOUR, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        text = "your prediction"
        left, right = (math.log2(limit) for limit in ax.get_xlim())
        room = (right - math.log2(prediction)) / (right - left) * points(ax)[0]
        fits = text_points(text, 9, bold=True) + 4 <= room
        ax.annotate(
            text, (prediction, 1), xycoords=("data", "axes fraction"), xytext=(4 if fits else -4, -2),
            textcoords="offset points", ha="left" if fits else "right", va="top", fontsize=9,
            fontweight="bold", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1}, zorder=4,
        )  # fmt: skip


def _height_axis(ax: Axes, lowest: float, highest: float) -> None:
    """From 0 where that costs less than a third of the height; room for the marks below the lowest point."""
    spread = (highest - lowest) or highest or 1.0
    bottom, top = lowest - 0.42 * spread, highest + 0.12 * spread
    if bottom < top / 3:
        # The marks stand in the lowest part, below the lowest point.
        bottom = min(0.0, (lowest - _MARKS * top) / (1 - _MARKS))
    ax.set_ylim(bottom, top)
    # Placed by hand: there is no time below 0.
    ax.set_yticks([tick for tick in ax.get_yticks() if max(0.0, bottom) <= tick <= top])
    ax.yaxis.grid(True)


def _mark_best(
    ax: Axes, series: list[tuple[str, float, float]], unit: str, lowest: float, prediction: float | None
) -> None:
    """Ring the lowest point of each series and say where it is, below the curve."""
    bottom = ax.get_ylim()[0]
    left, right = (math.log2(limit) for limit in ax.get_xlim())
    a_point = (right - left) / max(points(ax)[0], 1.0)
    for row, (name, x, y) in enumerate(reversed(series)):
        colour = tint(_SWEEP_COLOUR, 0.75) if name == "modelled" else _SWEEP_COLOUR
        ax.plot(
            [x], [y], "o", markersize=13, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.6
        )
        text = f"{name} best: {_number(x)} {unit}".rstrip() + f", {milliseconds(y / 1e3)} ms"
        half = a_point * (text_points(text, 9, bold=True) / 2 + 4)
        middle = 2 ** min(max(math.log2(x), left + half), right - half)
        height = lowest - (lowest - bottom) * (0.42 + 0.38 * row)
        ax.plot([x, x], [y, height], color=colour, linewidth=0.8, zorder=1)
        ax.text(
            middle, height, text, color=colour, fontsize=9, fontweight="bold", ha="center", va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip


def _least(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The setting with the least time, and that time."""
    index = min(range(len(y)), key=y.__getitem__)
    return x[index], y[index]


def _number(value: float) -> str:
    """A setting as text: "4", "0.25", "3.29", "1000"."""
    return f"{float(f'{value:.3g}'):g}"


def _in_milliseconds(point: Samples) -> list[float]:
    samples = [point] if isinstance(point, int | float) else list(point)
    if not samples:
        raise ValueError("measured has a setting without samples: give at least one for each")
    return [1e3 * seconds for seconds in samples]


def _positive(name: str, values: Sequence[float]) -> list[float]:
    values = list(values)
    if not values or any(not 0 < value < math.inf for value in values):
        raise ValueError(f"{name} must be numbers above 0, for a logarithmic axis, not {values!r}")
    return values


def _same_length(name: str, values: Sequence[Any], x: Sequence[float]) -> None:
    if len(values) != len(x):
        raise ValueError(
            f"{name} must have one value for each of the {len(x)} settings; it has {len(values)}"
        )
