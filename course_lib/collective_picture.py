"""A collective as a picture: who holds what before and after.

`show` draws what ranks really held; `CollectiveStepper` draws what a collective promises, for any number of
ranks, one sender after the other. Each piece of data has the colour and the letter of the rank that had it
first. Pieces side by side in one box have been added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets

from course_lib.figure import QUIET_COLOUR, TEXT_COLOUR, rank_colour, readable_on
from course_lib.provenance import COLLECTIVES, Holding, expected, read

LETTERS = "abcdefgh"
WIDTH, WIDE, MARGIN, GAP = 430, 860, 58, 8
ROW, BLOCK_GAP = 18, 3
ARROWS = 62

WHAT = {
    "broadcast": "The root's data goes to every rank.",
    "reduce": "Everyone's data is added up on the root.",
    "all_reduce": "Everyone's data is added up, and every rank gets the sum.",
    "scatter": "The root cuts its data in pieces; each rank gets one.",
    "gather": "The root collects everyone's data.",
    "all_gather": "Every rank collects everyone's data.",
    "reduce_scatter": "The data is added up piece by piece; each rank gets one piece of the sum.",
    "all_to_all": "Each rank sends a different piece to every rank.",
}


class Picture:
    """One or more drawings that show themselves in a notebook."""

    def __init__(self, drawings: list[str], text: str) -> None:
        self.drawings = drawings
        self.text = text

    def __add__(self, other: Picture) -> Picture:
        """Both, side by side."""
        return Picture(self.drawings + other.drawings, f"{self.text}\n\n{other.text}")

    def _repr_html_(self) -> str:
        boxes = "".join(f"<div>{drawing}</div>" for drawing in self.drawings)
        return f"<div style='display:flex;flex-wrap:wrap;gap:14px 22px'>{boxes}</div>"

    def __repr__(self) -> str:
        return self.text


def show(before: Sequence[Any], after: Sequence[Any], title: str) -> Picture:
    """What the ranks held, by rank: `blocks` tensors as they came back, or lists of them, or None."""
    held_before, held_after = [read(held) for held in before], [read(held) for held in after]
    return _picture(title, "measured", held_before, held_after, len(held_before), WIDTH)


def promise(collective: str, ranks: int, senders: int | None = None) -> Picture:
    """What a collective promises, with rank 0 as its root, once the first `senders` ranks have sent."""
    before, after = expected(collective, ranks)
    title = f"{collective} on {ranks} ranks"
    return _picture(title, "modelled", before, after, ranks if senders is None else senders, WIDE)


class CollectiveStepper(ipywidgets.VBox):
    """Choose a collective and the number of ranks, and let one rank after the other send."""

    def __init__(self, collective: str = "all_reduce", ranks: int = 4) -> None:
        self.collective = ipywidgets.Dropdown(options=COLLECTIVES, value=collective, description="collective")
        self.ranks = ipywidgets.IntSlider(ranks, 2, len(LETTERS), description="ranks")
        self.step = ipywidgets.IntSlider(ranks, 0, ranks, description="have sent")
        self.play = ipywidgets.Play(value=ranks, min=0, max=ranks, interval=900)
        ipywidgets.link((self.play, "value"), (self.step, "value"))
        self.picture = ipywidgets.HTML()
        controls = ipywidgets.HBox([self.collective, self.ranks, self.play, self.step])
        controls.layout.flex_flow = "row wrap"
        super().__init__([controls, self.picture])
        self.collective.observe(self._start_over, "value")
        self.ranks.observe(self._start_over, "value")
        self.step.observe(self._draw, "value")
        self._draw(None)

    def shown(self) -> Picture:
        """The picture at the controls' values."""
        return promise(self.collective.value, self.ranks.value, self.step.value)

    def _start_over(self, change: Any) -> None:
        for control in (self.step, self.play):
            control.max = self.ranks.value
        self.step.value = self.ranks.value
        self._draw(None)

    def _draw(self, change: Any) -> None:
        words = f"<p>{WHAT[self.collective.value]}</p>"
        self.picture.value = words + self.shown()._repr_html_()

    def __repr__(self) -> str:
        return f"{WHAT[self.collective.value]}\n{self.shown()!r}"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**options) or {}
        return {**bundle, "text/html": self.picture.value, "text/plain": repr(self)}


def _picture(
    title: str, kind: str, before: list[Holding], after: list[Holding], senders: int, width: int
) -> Picture:
    """Draw it, with only the first `senders` ranks having sent anything."""
    arrived = [[frozenset(p for p in block if p[0] < senders) for block in holding] for holding in after]
    reached = [[block for block in holding if block] for holding in arrived]
    return Picture([_svg(title, kind, before, reached, width)], _text(title, kind, before, reached))


def _text(title: str, kind: str, before: list[Holding], after: list[Holding]) -> str:
    lines = [f"{title} ({kind})"]
    cut = any(_is_cut(holding) for holding in [*before, *after])
    for rank, (had, has) in enumerate(zip(before, after, strict=True)):
        lines.append(f"  rank {rank}: {_words(had, cut)}  ->  {_words(has, cut)}")
    return "\n".join(lines)


def _words(holding: Holding, cut: bool) -> str:
    named = [
        "+".join(_letter(rank) + (str(chunk) if cut else "") for rank, chunk in sorted(b)) for b in holding
    ]
    return " | ".join(named) or "-"


def _is_cut(holding: Holding) -> bool:
    """Whether these blocks are pieces of something, so that their numbers matter."""
    return any(chunk for block in holding for _, chunk in block)


def _letter(rank: int) -> str:
    return LETTERS[rank % len(LETTERS)]


def _svg(title: str, kind: str, before: list[Holding], after: list[Holding], total: int) -> str:
    ranks = len(before)
    width = (total - MARGIN - GAP * (ranks - 1)) / ranks
    top, head = 44, max(1, *map(len, before)) * ROW
    below = top + head + ARROWS
    height = below + max(1, *map(len, after)) * ROW + 8
    cut = any(_is_cut(holding) for holding in [*before, *after])
    parts = [
        _label(0, 14, title, weight="bold", size=14),
        _label(total, 14, kind, anchor="end", style="italic", colour=QUIET_COLOUR),
        _label(0, top + 13, "before", colour=QUIET_COLOUR),
        _label(0, below + 13, "after", colour=QUIET_COLOUR),
    ]
    lefts = [MARGIN + rank * (width + GAP) for rank in range(ranks)]
    parts += _arrows(after, lefts, width, top + head, below)
    for rank, left in enumerate(lefts):
        parts.append(_label(left + width / 2, top - 7, f"rank {rank}", anchor="middle", size=11))
        parts += _holding(before[rank], left, top, width, head, cut)
        parts += _holding(after[rank], left, below, width, height - below - 8, cut)
    inner = "".join(parts)
    return (
        f"<svg width='{total}' height='{height:.0f}' viewBox='-1 0 {total + 2} {height:.0f}' role='img' "
        f"style='max-width:100%;background:#fff;font-family:sans-serif' aria-label='{escape(title)}'>"
        f"{inner}</svg>"
    )


def _arrows(after: list[Holding], lefts: list[float], width: float, start: float, end: float) -> list[str]:
    """A line from each rank whose data another one holds afterwards."""
    lines = []
    for rank, holding in enumerate(after):
        for source in sorted({origin for block in holding for origin, _ in block}):
            # Lines of different ranks leave and arrive side by side.
            shift = (source - (len(lefts) - 1) / 2) * min(5, width / len(lefts))
            x1, x2 = lefts[source] + width / 2, lefts[rank] + width / 2 + shift
            colour = rank_colour(source)
            dashes = " stroke-dasharray='2 3'" if source == rank else ""
            lines.append(
                f"<path d='M{x1:.1f} {start + 3:.0f} C{x1:.1f} {start + 32:.0f} {x2:.1f} {end - 34:.0f} "
                f"{x2:.1f} {end - 7:.0f}' fill='none' stroke='{colour}' stroke-width='1.6'{dashes}/>"
                f"<path d='M{x2 - 3:.1f} {end - 8:.0f} h6 l-3 6 z' fill='{colour}'/>"
            )
    return lines


def _holding(holding: Holding, left: float, top: float, width: float, height: float, cut: bool) -> list[str]:
    """One rank's blocks, one below the other."""
    if not holding:
        box = f"x='{left:.1f}' y='{top}' width='{width:.1f}' height='{ROW - BLOCK_GAP}'"
        return [f"<rect {box} fill='none' stroke='#BBBBBB' stroke-dasharray='3 3'/>"]
    parts = []
    for row, block in enumerate(holding):
        y = top + row * ROW
        pieces = sorted(block)
        each = width / max(1, len(pieces))
        for index, (rank, chunk) in enumerate(pieces):
            x = left + index * each
            colour = rank_colour(rank)
            name = _letter(rank) + (
                f"<tspan dy='2' font-size='8'>{chunk}</tspan>" if cut and each > 14 else ""
            )
            parts.append(
                f"<rect x='{x:.1f}' y='{y}' width='{each:.1f}' height='{ROW - BLOCK_GAP}' fill='{colour}'/>"
                f"<text x='{x + each / 2:.1f}' y='{y + 11.5}' text-anchor='middle' font-size='11' "
                f"fill='{readable_on(colour)}'>{name}</text>"
            )
            if index and each > 16:
                parts.append(_label(x, y + 12, "+", anchor="middle", size=11, colour="#FFFFFF"))
        box = f"x='{left:.1f}' y='{y}' width='{width:.1f}' height='{ROW - BLOCK_GAP}'"
        parts.append(f"<rect {box} fill='none' stroke='{TEXT_COLOUR}' stroke-width='0.7'/>")
    return parts


def _label(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
    style: str = "normal",
    colour: str = TEXT_COLOUR,
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' font-weight='{weight}' "
        f"font-style='{style}' fill='{colour}'>{escape(text)}</text>"
    )
