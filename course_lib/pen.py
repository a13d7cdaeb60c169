"""Drawing in seconds of a run's clock and in rows, knowing what text fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from .figure import points, text_points
from .intervals import Interval

ROW = 1.0


class Pen:
    """Draws on axes whose x is milliseconds since `origin`, in seconds, and whose y counts rows down."""

    def __init__(self, ax: Axes, origin: float):
        self.ax, self.origin = ax, origin
        self.points_a_second = points(ax)[0] / (ax.get_xlim()[1] / 1e3)

    def x(self, seconds: float) -> float:
        """Milliseconds on the axis."""
        return (seconds - self.origin) * 1e3

    def points(self, interval: Interval) -> float:
        """How wide a stretch of time is drawn."""
        return (interval[1] - interval[0]) * self.points_a_second

    def seconds(self, width: float) -> float:
        """How much time is drawn as `width` points."""
        return width / self.points_a_second

    def boxes(
        self,
        intervals: Sequence[Interval],
        top: float,
        colour: Any,
        height: float = ROW,
        *,
        zorder: float = 2.0,
        hatch: str | None = None,
        edge: str = "none",
    ) -> None:
        """Fill these stretches of time in one row."""
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
        """Draw paths of (seconds, row)."""
        placed = [[(self.x(seconds), y) for seconds, y in path] for path in paths]
        self.ax.add_collection(
            LineCollection(placed, colors=colour, linewidths=width, zorder=3, clip_on=False), autolim=False
        )

    def label(self, interval: Interval, top: float, text: str, colour: str, *, boxed: bool = False) -> bool:
        """Write `text` inside a box; False, and nothing written, where it does not fit."""
        if text_points(text, 9) + 4 > self.points(interval):
            return False
        background = {"facecolor": "white", "edgecolor": "none", "pad": 1} if boxed else None
        self.text(sum(interval) / 2, top + ROW / 2, text, colour, 9, bbox=background)
        return True

    def label_first(self, interval: Interval, top: float, texts: Sequence[str], colour: str) -> bool:
        """Write the first of `texts` that fits inside a box; False where none does."""
        return any(self.label(interval, top, text, colour) for text in texts)

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
        """Write `text` at a time, moved right by `shift` points."""
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
