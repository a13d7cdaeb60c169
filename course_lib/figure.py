"""What the workbook's figures share: the style, the colours, and text that fits.

One colour a rank, the same in every figure; one colour for communication that is hidden, one strong one for
communication that is exposed, light grey for waiting. All can be told apart by colour-blind readers (after
Okabe and Ito, and Tol).
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib import colors
from matplotlib.axes import Axes

from .spans import Span

STYLE = Path(__file__).with_name("course.mplstyle")
RANK_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#999933", "#56B4E9", "#332288", "#882255", "#DDCC77")
EXPOSED_COLOUR = "#D55E00"
HIDDEN_COLOUR = "#BCCCDA"
HIDDEN_TEXT_COLOUR = "#4F6B85"
NEUTRAL_COLOUR = "#C9C9C9"
WAITING_COLOUR = "#E2E2E2"
TEXT_COLOUR = "#202020"
QUIET_COLOUR = "#707070"
GRID_COLOUR = "#E4E4E4"

KINDS = ("measured", "paced", "modelled", "published")

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def _style() -> mpl.RcParams:
    return mpl.rc_params_from_file(STYLE, use_default_template=False)


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Draw with the workbook's style, and leave the notebook's own settings as they were."""

    @functools.wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        # A notebook's backend is loaded at the first figure, and brings settings that a context would undo:
        # without them the second figure and all that follow would not be shown.
        from matplotlib import pyplot

        pyplot.draw_if_interactive()
        with mpl.rc_context(_style()):
            return draw(*args, **kwargs)

    return wrapper


def rank_colour(rank: int) -> str:
    """The colour of a rank, the same in every figure; after eight they repeat."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def tint(colour: str, strength: float) -> tuple[float, float, float]:
    """`colour` mixed with white (strength below 1) or with black (above 1, up to 2)."""
    red, green, blue = colors.to_rgb(colour)
    towards, share = (1.0, 1.0 - strength) if strength <= 1 else (0.0, strength - 1.0)
    return tuple(part + (towards - part) * share for part in (red, green, blue))  # type: ignore[return-value]


def readable_on(colour: Any) -> str:
    """White or dark, whichever can be read on `colour`."""
    red, green, blue = colors.to_rgb(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.6 else TEXT_COLOUR


def kind_of(source: Any, kind: str | None) -> str:
    """What a figure's numbers are: as given, or as `source` says. ValueError where neither says."""
    kind = kind if kind is not None else getattr(source, "kind", None)
    if kind not in KINDS:
        raise ValueError(f"say what the numbers are: kind must be one of {', '.join(KINDS)}, not {kind!r}")
    return kind


def spans_of(source: Any) -> list[Span]:
    """The spans of a run, of a simulation or of a list. ValueError where there are none."""
    spans = getattr(source, "spans", source)
    if not isinstance(spans, Iterable):
        raise ValueError(
            f"cannot draw a {type(source).__name__}: give a run, a simulation or a list of spans"
        )
    spans = list(spans)
    if not spans:
        raise ValueError(
            "there is nothing to draw: no spans were recorded. In the function that you launch, call "
            "probe(model), or put span('name') around what you want to see."
        )
    return spans


def new_axes(ax: Axes | None, width: float = 9.0, height: float = 3.6, **margins: float) -> Axes:
    """`ax`, or the axes of a new figure with margins in inches: left, right, top, bottom."""
    if ax is not None:
        return ax
    from matplotlib import pyplot

    figure, ax = pyplot.subplots(figsize=(width, height))
    figure.subplots_adjust(
        left=margins.get("left", 0.9) / width,
        right=1 - margins.get("right", 0.3) / width,
        bottom=margins.get("bottom", 0.6) / height,
        top=1 - margins.get("top", 0.6) / height,
    )
    return ax


def png(ax: Axes) -> bytes:
    """The figure of `ax` as PNG, for a widget that redraws; the figure is closed."""
    from matplotlib import pyplot

    figure, buffer = ax.get_figure(root=True), io.BytesIO()
    assert figure is not None
    # Little compression: it is drawn anew at the next move of a slider.
    figure.savefig(buffer, format="png", pil_kwargs={"compress_level": 1})
    pyplot.close(figure)
    return buffer.getvalue()


def name_kind(ax: Axes, kind: str, **where: Any) -> None:
    """Write what the numbers are at the upper right, above the axes."""
    ax.set_title(
        kind, loc="right", fontsize=9, fontweight="normal", fontstyle="italic", color=QUIET_COLOUR, **where
    )


def points(ax: Axes) -> tuple[float, float]:
    """The width and height of the axes in points, in which text is measured too."""
    box = ax.get_window_extent()
    dots_an_inch = ax.figure.dpi
    return box.width / dots_an_inch * 72, box.height / dots_an_inch * 72


def text_points(text: str, size: float, *, bold: bool = False) -> float:
    """About how wide `text` is, in points. Asking the renderer would cost a drawing of the whole figure."""
    return (0.68 if bold else 0.59) * size * max(len(line) for line in text.split("\n"))


def milliseconds(seconds: float) -> str:
    """Seconds as text in ms, with no more digits than a reader needs: "0", "0.35", "8.4", "84", "1,250"."""
    ms = seconds * 1e3
    if ms == 0 or ms >= 9.95:
        return f"{ms:,.0f}"
    return f"{ms:.1f}" if ms >= 0.95 else f"{ms:.2g}" if ms >= 0.005 else "0"


def binary_size(size: float) -> str:
    """Bytes as text, in KiB, MiB or GiB of 1024, as `bucket_cap_mb` counts: "576 KiB", "2.25 MiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        # From 1023.5 on it would read as 1024 of the smaller unit.
        if size >= unit - unit / 2048:
            amount = size / unit
            digits = 2 if amount < 9.995 else 1 if amount < 99.95 else 0
            return f"{round(amount, digits):g} {name}" if digits else f"{amount:.0f} {name}"
    return f"{size:.0f} B"
