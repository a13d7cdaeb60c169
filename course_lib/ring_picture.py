"""Pictures of chunks and of whose contributions they hold, as SVG: quick enough to redraw at each step.

Columns are ranks, rows are chunks. A chunk has one slot for each rank, filled in that rank's colour when the
chunk holds its contribution; a number in it says how often, where that is not once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from course_lib.figure import QUIET_COLOUR, TEXT_COLOUR, rank_colour, readable_on

WIDTH = 880
State = Sequence[Sequence[Counter]]
_EDGE = "#B8B8B8"
_LEGEND = "columns: ranks · rows: chunks c0, c1, … · framed: has just arrived"


class Drawing:
    """An SVG that a notebook shows, with the same in words for where it cannot."""

    def __init__(self, body: str, width: float, height: float, words: str) -> None:
        self.words = words
        self.svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" style="max-width:100%;height:auto;background:white" role="img" '
            f'aria-label="{escape(words)}" font-family="DejaVu Sans, Arial, sans-serif" font-size="12" '
            f'fill="{TEXT_COLOUR}"><rect width="{width:g}" height="{height:g}" fill="white"/>{body}</svg>'
        )

    def __repr__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        return {"image/svg+xml": self.svg, "text/plain": self.words}


def text(x: float, y: float, words: str, **style: Any) -> str:
    """Words at a place; style: SVG attributes, with _ for -."""
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, **style: Any) -> str:
    """A rectangle."""
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{attributes}/>'
    )


def cell(x: float, y: float, width: float, height: float, chunk: Counter, ranks: int, moved: bool) -> str:
    """One chunk of one rank: a slot for each rank's contribution. moved: it has just arrived."""
    slot = width / ranks
    parts = [box(x, y, width, height, "white")]
    for rank in range(ranks):
        times = chunk[rank]
        if not times:
            continue
        colour = rank_colour(rank)
        parts.append(box(x + rank * slot, y, slot, height, colour))
        label = f"{times} x" if times != 1 else str(rank) if slot >= 9 else ""
        if label:
            style = {"text_anchor": "middle", "font_size": min(10, 0.9 * slot), "fill": readable_on(colour)}
            parts.append(text(x + (rank + 0.5) * slot, y + height / 2 + 3.5, label, **style))
    frame = {"stroke": TEXT_COLOUR, "stroke_width": 2.4} if moved else {"stroke": _EDGE, "stroke_width": 1}
    parts.append(box(x, y, width, height, "none", **frame))
    return "".join(parts)


def grid(
    state: State,
    before: State | None,
    x: float,
    y: float,
    cell_width: float,
    cell_height: float,
    gap: float,
    rank_word: str = "",
) -> str:
    """All ranks' chunks, those that changed since `before` framed. `y` is the top of the first chunk."""
    ranks, parts = len(state), []
    for rank, chunks in enumerate(state):
        left = x + rank * (cell_width + gap)
        style = {"text_anchor": "middle", "fill": QUIET_COLOUR, "font_size": 11}
        parts.append(text(left + cell_width / 2, y - 6, f"{rank_word}{rank}", **style))
        for number, chunk in enumerate(chunks):
            moved = before is not None and before[rank][number] != chunk
            top = y + number * (cell_height + 4)
            parts.append(cell(left, top, cell_width, cell_height, chunk, ranks, moved))
    return "".join(parts)


def film(states: Sequence[State], title: str = "Whose contributions does each chunk hold?") -> Drawing:
    """Every state of an all-reduce, one panel each: what each rank holds, and what has just arrived.

    states: as `ring_steps.states` gives them, with Counters for chunks. ValueError where there are none.
    """
    if not states or not states[0]:
        raise ValueError("there are no states to draw: give what ring_steps.states returned")
    ranks, chunks = len(states[0]), len(states[0][0])
    columns = min(len(states), 4 if ranks <= 4 else 2)
    panel = (WIDTH - 20) / columns
    cell_width, cell_height = (panel - 46) / ranks - 4, 20
    height_of_row = chunks * (cell_height + 4) + 58
    parts = [text(10, 20, title, font_weight="bold", font_size=13)]
    parts.append(text(WIDTH - 10, 20, _LEGEND, text_anchor="end", font_size=11, fill=QUIET_COLOUR))
    for number, state in enumerate(states):
        left, top = 10 + (number % columns) * panel, 48 + (number // columns) * height_of_row
        name = "start" if number == 0 else f"after step {number}"
        parts.append(text(left + 34, top, name, font_weight="bold"))
        for chunk in range(chunks):
            y = top + 26 + chunk * (cell_height + 4) + cell_height / 2 + 4
            parts.append(text(left + 28, y, f"c{chunk}", text_anchor="end", font_size=11, fill=QUIET_COLOUR))
        before = states[number - 1] if number else None
        word = "rank " if cell_width >= 40 else ""
        parts.append(grid(state, before, left + 34, top + 26, cell_width, cell_height, 4, word))
    rows = -(-len(states) // columns)
    return Drawing("".join(parts), WIDTH, 44 + rows * height_of_row, _words(states))


def _contributors(chunk: Counter) -> str:
    return "".join(map(str, sorted(chunk.elements()))) or "-"


def _words(states: Sequence[State]) -> str:
    """The states in words: for each rank its chunks, each as the ranks that are in it."""
    lines = []
    for number, state in enumerate(states):
        ranks = "   ".join(
            f"rank {rank}: {' '.join(map(_contributors, chunks))}" for rank, chunks in enumerate(state)
        )
        lines.append(f"{'start' if number == 0 else f'after step {number}'}: {ranks}")
    return "\n".join(lines)


def bars(
    seconds: Mapping[str, float], done: Mapping[str, float], x: float, y: float, width: float
) -> tuple[str, float]:
    """Times as horizontal bars with their names, the part that is over filled; and where they end.

    seconds: by name. done: for some of the names, how much of it is over.
    """
    longest, parts = max(seconds.values(), default=0.0) or 1.0, []
    name_width = 112
    for row, (name, whole) in enumerate(seconds.items()):
        top, length = y + row * 24, (width - name_width - 84) * whole / longest
        part = done.get(name, 0.0)
        bold = {"font_weight": "bold"} if name in done else {}
        parts.append(text(x + name_width - 8, top + 12, name, text_anchor="end", **bold))
        parts.append(box(x + name_width, top, max(length, 1), 16, "#D5DEE6"))
        if part:
            parts.append(box(x + name_width, top, max(length, 1) * min(1.0, part / whole), 16, "#0072B2"))
        parts.append(text(x + name_width + length + 6, top + 12, duration(whole), **bold))
    return "".join(parts), y + len(seconds) * 24


def decimal_bytes(size: float) -> str:
    """Bytes as text, in kB, MB or GB of 1000: "64 kB", "1.75 MB", "300 B"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 999.5 * unit else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} B"


def duration(seconds: float) -> str:
    """Seconds as text with a unit that fits: "3.2 s", "120 ms", "45 µs"."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            number = seconds / unit
            return f"{number:.3g} {name}" if number < 1000 else f"{number:,.0f} {name}"
    return f"{seconds * 1e6:.3g} µs"
