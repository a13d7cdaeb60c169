"""The figures of data parallel: a step's movements, memory by device, growth over devices, bytes, the GIL.

    movements(model.step)                what each device computes and what device 0's link carries
    memory(model.step)                   what each device held when it held most
    over_devices(counts, …)              something of device 0's over the number of devices, with its formula
    bytes_by_device({"DP": …, "DDP": …}) what went over each device's link
    gil(gil_experiment())                two workers against one

Devices have the colours of ranks. Kinds of memory have colours of their own, here and in the stepper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import MaxNLocator

from course_lib.dp_ledger import MOVEMENTS, Movement, Step
from course_lib.figure import (
    GRID_COLOUR,
    QUIET_COLOUR,
    TEXT_COLOUR,
    binary_size,
    kind_of,
    name_kind,
    new_axes,
    points,
    rank_colour,
    readable_on,
    styled,
    text_points,
    tint,
)
from course_lib.gil import THREADS, WORKERS, GilResult

KIND_COLOURS = {
    "parameters": "#6B6B6B",
    "replica": "#A8A8A8",
    "optimizer": "#332288",
    "inputs": "#56B4E9",
    "activations": "#DCDCDC",
    "outputs": "#009E73",
    "output gradients": "#8ED3BC",
    "gradients": "#CC79A7",
}
_SERIES_COLOURS = ("#0072B2", "#E69F00")


@styled
def movements(step: Step, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw one step of data parallel: two rows for device 0's link, one for each device's computing.

    A copy on the link has the colour of the device at its other end.
    """
    if not step.movements:
        raise ValueError("this step has no movements: call the model first")
    rows = [
        "device 0's link, out",
        "device 0's link, in",
        *(f"device {d} computes" for d in range(step.used)),
    ]
    ax = new_axes(ax, height=1.35 + 0.3 * len(rows), left=1.55, right=0.2, top=0.95)
    origin = step.movements[0].start
    last = step.movements[-1].end - origin
    ax.set_xlim(0, last * 1e3)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("milliseconds since the step began")
    for movement in step.movements:
        _bars(ax, movement, origin)
    _number_movements(ax, step, origin)
    ax.set_title(title or f"One step of data parallel on {step.used} devices", pad=42, x=-96 / points(ax)[0])
    name_kind(ax, step.kind, pad=42)
    return ax


def _bars(ax: Axes, movement: Movement, origin: float) -> None:
    for copy in movement.copies:
        row, other = (0, copy.target) if copy.source == 0 else (1, copy.source)
        _bar(ax, row, copy.start - origin, copy.end - origin, tint(rank_colour(other), 0.75), str(other))
    for device, start, end in movement.work:
        _bar(ax, 2 + device, start - origin, end - origin, rank_colour(device), "")
    ax.axvline((movement.end - origin) * 1e3, color=GRID_COLOUR, linewidth=0.8, zorder=0.5)


def _bar(ax: Axes, row: float, start: float, end: float, colour: object, label: str) -> None:
    ax.barh(row, (end - start) * 1e3, 0.72, start * 1e3, color=colour, edgecolor="white", linewidth=0.6)
    a_point = ax.get_xlim()[1] / max(points(ax)[0], 1.0)
    if label and (end - start) * 1e3 > (text_points(label, 8) + 4) * a_point:
        middle = (start + end) / 2 * 1e3
        ax.text(middle, row, label, ha="center", va="center", fontsize=8, color=readable_on(colour))


def _number_movements(ax: Axes, step: Step, origin: float) -> None:
    """The movements' numbers above their columns, and what the numbers mean in a line above that."""
    width, height = points(ax)
    a_point, where = ax.get_xlim()[1] / max(width, 1.0), ax.get_xaxis_transform()
    reached = -1e9
    for movement in step.movements:
        middle = ((movement.start + movement.end) / 2 - origin) * 1e3
        name = str(movement.number or "backward")
        middle = max(middle, reached + (text_points(name, 9, bold=True) / 2 + 3) * a_point)
        reached = middle + text_points(name, 9, bold=True) / 2 * a_point
        bold = "bold" if movement.number else "normal"
        ax.text(middle, 1 + 3 / height, name, transform=where, ha="center", fontsize=9, fontweight=bold)
    said = "    ".join(f"{number} {name}" for number, name in enumerate(MOVEMENTS, 1))
    ax.text(-96 / width, 1 + 22 / height, said, transform=ax.transAxes, fontsize=9, color=QUIET_COLOUR)


@styled
def memory(step: Step, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw what each device held when it held most, by kind, one bar a device."""
    if not step.peaks:
        raise ValueError("this step has no memory on record: call the model first")
    ax = new_axes(ax, height=1.5 + 0.36 * step.devices, left=0.9, right=0.9, top=0.95)
    most = max(step.peak(device) for device in range(step.devices))
    ax.set_xlim(0, most * 1.02)
    ax.set_ylim(step.devices - 0.4, -0.6)
    ax.set_yticks(range(step.devices), [f"device {device}" for device in range(step.devices)])
    ax.tick_params(axis="y", length=0)
    for device, peak in enumerate(step.peaks):
        left = 0
        for kind, colour in KIND_COLOURS.items():
            size = peak.get(kind, 0)
            ax.barh(device, size, 0.74, left, color=colour, edgecolor="white", linewidth=0.6)
            left += size
        label = f" {binary_size(left)}" if left else " unused"
        ax.text(left, device, label, va="center", fontsize=9, fontweight="bold" if device == 0 else "normal")
    seen = [kind for kind in KIND_COLOURS if any(peak.get(kind) for peak in step.peaks)]
    _legend(ax, {kind: KIND_COLOURS[kind] for kind in seen})
    _in_bytes(ax.xaxis, most)
    ax.set_xlabel("bytes held at each device's peak")
    ax.set_title(title or f"Memory of {step.devices} devices in a step of data parallel", pad=28)
    name_kind(ax, "measured", pad=28)
    return ax


def _in_bytes(axis: Axis, most: float) -> None:
    """Ticks at round numbers of KiB, MiB or GiB, for values up to `most` bytes."""
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    unit, name = next((known for known in units if most >= known[0]), (1, "B"))
    low, high = (float(end) / unit for end in axis.get_view_interval())
    low, high = min(low, high), max(low, high)
    ticks = [tick for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high]
    labels = [f"{abs(tick):g} {name}" if tick else "0" for tick in ticks]
    axis.set_ticks([tick * unit for tick in ticks], labels)


def _legend(ax: Axes, colours: Mapping[str, object]) -> None:
    """Names in a line under the title, each behind a square of its colour."""
    width, x = points(ax)[0], 0.0
    for name, colour in colours.items():
        at: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
        ax.annotate("■", (x / width, 1), xytext=(0, 7), color=colour, fontsize=11, **at)
        ax.annotate(name, (x / width, 1), xytext=(12, 8), color=TEXT_COLOUR, fontsize=9, **at)
        x += 26 + text_points(name, 9)


@styled
def over_devices(
    counts: Sequence[int],
    measured: Mapping[str, Sequence[float]],
    formula: Mapping[str, Sequence[float]],
    ax: Axes | None = None,
    *,
    title: str,
    y_label: str = "bytes",
    kind: str = "measured",
) -> Axes:
    """Draw bytes over the number of devices: a point where it was measured, a line where the formula is.

    measured, formula: by the name of what is shown, the bytes for each of `counts`.
    """
    kind = kind_of(None, kind)
    ax = new_axes(ax, height=3.4, left=0.95, right=1.5, top=0.55)
    for colour, (name, values) in zip(_SERIES_COLOURS, measured.items(), strict=False):
        ax.plot(counts, formula[name], color=tint(colour, 0.45), linewidth=2.2, zorder=2)
        ax.plot(counts, values, "o", color=colour, zorder=3)
        ax.annotate(
            name, (counts[-1], values[-1]), xytext=(9, 0), textcoords="offset points", va="center",
            color=tint(colour, 1.2), fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    ax.set_xlabel("devices")
    ax.set_ylabel(y_label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    most = max(max(values) for values in [*measured.values(), *formula.values()])
    ax.set_ylim(0, 1.08 * most)
    _in_bytes(ax.yaxis, most)
    ax.yaxis.grid(True)
    ax.set_title(title)
    name_kind(ax, f"● {kind}     — formula")
    return ax


@styled
def bytes_by_device(
    series: Mapping[str, Sequence[tuple[float, float]]],
    ax: Axes | None = None,
    *,
    title: str,
    kind: str = "measured",
) -> Axes:
    """Draw what each device's link carried, sent to the right of a line and received to the left of it.

    series: by name, such as "DP" and "DDP", for each device its (sent, received) bytes.
    """
    kind = kind_of(None, kind)
    count = max(map(len, series.values()))
    ax = new_axes(ax, height=1.6 + 0.26 * count * len(series), left=0.9, right=0.3, top=0.8)
    most = max(max(pair) for pairs in series.values() for pair in pairs)
    ax.set_xlim(-1.28 * most, 1.28 * most)
    rows = count * (len(series) + 0.5)
    ax.set_ylim(rows - 0.25, -0.75)
    for index, (name, pairs) in enumerate(series.items()):
        colour = _SERIES_COLOURS[index % len(_SERIES_COLOURS)]
        for device, (sent, received) in enumerate(pairs):
            y = device * (len(series) + 0.5) + index
            for size, sign, side in ((sent, 1, "left"), (received, -1, "right")):
                ax.barh(y, sign * size, 0.86, color=colour if sign > 0 else tint(colour, 0.6))
                gap = sign * 0.015 * most
                label = f"{name} {binary_size(size)}"
                ax.text(sign * size + gap, y, label, ha=side, va="center", fontsize=8.5)
    middles = [d * (len(series) + 0.5) + (len(series) - 1) / 2 for d in range(count)]
    ax.set_yticks(middles, [f"device {device}" for device in range(count)])
    ax.tick_params(axis="y", length=0)
    ax.axvline(0, color=TEXT_COLOUR, linewidth=0.8)
    _in_bytes(ax.xaxis, most)
    ax.set_xlabel("←  received                                        sent  →")
    ax.set_title(title)
    name_kind(ax, kind)
    return ax


@styled
def gil(result: GilResult, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw how many of two workers could go on at once, for Python and C work in threads and processes."""
    ax = new_axes(ax, height=2.7, left=1.55, right=2.1, top=0.55)
    labels = []
    for row, ((work, how), gain) in enumerate(result.items()):
        colour = _SERIES_COLOURS[0] if how == THREADS else _SERIES_COLOURS[1]
        ax.barh(row, gain.at_once, 0.68, color=colour)
        ax.plot(gain.busy, [row] * len(gain.busy), "|", color=TEXT_COLOUR, markersize=9, markeredgewidth=0.9)
        ax.annotate(
            f"{gain.at_once:.1f} at once, speed-up {gain.speedup:.1f}",
            (WORKERS, row), xytext=(10, 0), textcoords="offset points", va="center", fontsize=9,
            annotation_clip=False,
        )  # fmt: skip
        labels.append(f"{work} in {how}")
    ax.set_yticks(range(len(labels)), labels)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.set_xlim(0, WORKERS * 1.02)
    ax.set_xticks([0, 1, 2])
    ax.axvline(1, color=GRID_COLOUR, linewidth=1, zorder=0.5)
    ax.set_xlabel("workers that could go on at once, of two (bar: median round, ticks: each round)")
    ax.set_title(title or "The same work in Python and in C, by two workers")
    name_kind(ax, result.kind)
    return ax
