"""The ring player: play or step a ring all-reduce of N ranks, with the times that the formulas give it.

RingPlayer(ranks=4, pace=Pace(gbps=0.05, latency_us=10_000), message_bytes=125_000)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import ipywidgets

from course_lib import cost
from course_lib.figure import QUIET_COLOUR, TEXT_COLOUR
from course_lib.pace import Pace
from course_lib.ring_picture import WIDTH, Drawing, bars, decimal_bytes, duration, grid, text
from course_lib.ring_steps import complete, phase, ring_states, sends, steps

MOST_RANKS = 8
SIZES = (1_000, 8_000, 32_000, 125_000, 500_000, 2_000_000, 8_000_000, 25_000_000, 100_000_000, 1_000_000_000)
GBPS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 25, 100, 400, 3600)
LATENCIES_US = (0, 1, 5, 20, 100, 500, 1000, 5000, 10_000, 50_000)
MILLISECONDS_A_STEP = 900


class RingPlayer(ipywidgets.VBox):
    """Buttons and sliders over a picture of the ring. Without a front end it leaves the picture it stands at.

    ranks: 2 to 8. pace: the link to start with, which has a bandwidth. message_bytes: what each rank holds.
    step: after how many steps it stands at first.
    """

    def __init__(
        self,
        ranks: int = 4,
        pace: Pace | None = None,
        message_bytes: int = 25_000_000,
        step: int = 0,
    ) -> None:
        if isinstance(ranks, bool) or ranks not in range(2, MOST_RANKS + 1):
            raise ValueError(f"the player has room for 2 to {MOST_RANKS} ranks, not {ranks!r}")
        pace = pace or Pace(gbps=10, latency_us=20)
        if pace.gbps is None:
            raise ValueError("pace has no bandwidth: give the player a link, such as Pace(gbps=1)")
        if not message_bytes > 0:
            raise ValueError(f"message_bytes must be above 0, not {message_bytes!r}")
        if not 0 <= step <= steps(ranks):
            raise ValueError(f"step must be from 0 to {steps(ranks)} with {ranks} ranks, not {step!r}")
        self.ranks = _slider("ranks", range(2, MOST_RANKS + 1), ranks)
        self.size = _slider("size", {*SIZES, message_bytes}, message_bytes, decimal_bytes)
        self.gbps = _slider("Gbit/s", {*GBPS, pace.gbps}, pace.gbps)
        self.latency_us = _slider("latency, µs", {*LATENCIES_US, pace.latency_us}, pace.latency_us)
        self.step = ipywidgets.IntSlider(
            step, 0, steps(ranks), description="step", style=_WIDE_NAMES, continuous_update=True
        )
        self.play = ipywidgets.Play(step, 0, steps(ranks), interval=MILLISECONDS_A_STEP)
        self.back = ipywidgets.Button(description="◀ step", layout=ipywidgets.Layout(width="80px"))
        self.forward = ipywidgets.Button(description="step ▶", layout=ipywidgets.Layout(width="80px"))
        self.picture = ipywidgets.HTML()
        above = ipywidgets.HBox([self.play, self.back, self.forward, self.step])
        controls = ipywidgets.GridBox(
            [self.ranks, self.size, self.gbps, self.latency_us],
            layout=ipywidgets.Layout(grid_template_columns="1fr 1fr", max_width=f"{WIDTH}px"),
        )
        super().__init__([above, controls, self.picture])
        # In the browser, so that playing does not wait for the kernel to move the slider.
        ipywidgets.jslink((self.play, "value"), (self.step, "value"))
        self.back.on_click(lambda _: self.go(self.step.value - 1))
        self.forward.on_click(lambda _: self.go(self.step.value + 1))
        self.ranks.observe(self._other_ranks, "value")
        for control in (self.step, self.size, self.gbps, self.latency_us):
            control.observe(self._draw, "value")
        self._draw(None)

    def go(self, step: int) -> None:
        """Stand after `step` steps; the first or the last where there are not as many."""
        self.step.value = max(0, min(step, self.step.max))

    def seconds(self) -> dict[str, float]:
        """Modelled seconds of each all-reduce at the sliders' values; halving-doubling where it can be."""
        n, size, gbps, latency = (c.value for c in (self.ranks, self.size, self.gbps, self.latency_us))
        formulas: dict[str, Any] = {
            "ring": cost.ring_all_reduce,
            "star": cost.star_all_reduce,
            "tree": cost.tree_all_reduce,
        }
        if n & (n - 1) == 0:
            formulas["halving-doubling"] = cost.halving_doubling_all_reduce
        return {name: formula(size, n, gbps, latency) for name, formula in formulas.items()}

    def drawing(self) -> Drawing:
        """The picture at the sliders' values."""
        return _draw_ring(self.ranks.value, self.step.value, self.size.value, self.seconds())

    def text(self) -> str:
        """The same in words."""
        return self.drawing().words

    def _other_ranks(self, change: Any) -> None:
        last = steps(self.ranks.value)
        self.step.value = min(self.step.value, last)
        self.step.max = self.play.max = last
        self._draw(None)

    def _draw(self, change: Any) -> None:
        self.picture.value = self.drawing().svg

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**options) or {}
        return {**bundle, "image/svg+xml": self.picture.value, "text/plain": self.text()}


_WIDE_NAMES = {"description_width": "90px"}


def _slider(name: str, values: Any, value: float, show: Any = None) -> ipywidgets.SelectionSlider:
    show = show or (lambda v: f"{v:g}" if v < 1000 else f"{v:,.0f}")
    options = [(show(v), v) for v in sorted(values)]
    return ipywidgets.SelectionSlider(options=options, value=value, description=name, style=_WIDE_NAMES)


_states = functools.cache(ring_states)


def _draw_ring(ranks: int, step: int, size: float, seconds: Mapping[str, float]) -> Drawing:
    """The chunks after `step` steps, the moves of the last of them as arrows, and the times below."""
    states, last = _states(ranks), steps(ranks)
    state, before = states[step], states[step - 1] if step else None
    each = seconds["ring"] / last
    gap, left, top, cell_height = 26.0, 70.0, 92.0, 24.0
    cell_width = (WIDTH - left - 20) / ranks - gap
    sums = sum(complete(chunk, ranks) for chunks in state for chunk in chunks)
    if step == 0:
        title, does = "Start", "Each rank holds its own numbers, in as many chunks as there are ranks."
    else:
        title = f"Step {step} of {last}: {phase(step - 1, ranks)}"
        adds = "adds it to its own" if step < ranks else "keeps it: it is a finished sum"
        does = f"Each rank sends one chunk to the right; who gets it {adds}."
    sizes = (
        f"A chunk: {decimal_bytes(size)} / {ranks} = {decimal_bytes(size / ranks)}, {duration(each)} a step."
    )
    sent = decimal_bytes(step * size / ranks)
    so_far = f"Sent by each rank so far: {sent}. Finished sums: {sums} of {ranks**2}."
    parts = [
        text(10, 20, title, font_weight="bold", font_size=14),
        text(10, 40, does),
        text(10, 58, f"{sizes} {so_far}", fill=QUIET_COLOUR),
        text(WIDTH - 10, 20, "modelled", text_anchor="end", font_style="italic", fill=QUIET_COLOUR),
    ]
    for chunk in range(ranks):
        y = top + chunk * (cell_height + 4) + cell_height / 2 + 4
        parts.append(text(left - 24, y, f"chunk {chunk}", text_anchor="end", font_size=11, fill=QUIET_COLOUR))
    parts.append(grid(state, before, left, top, cell_width, cell_height, gap, "rank "))
    if step:
        for rank in range(ranks):
            y = top + sends(rank, step - 1, ranks) * (cell_height + 4) + cell_height / 2
            x = left + rank * (cell_width + gap) + cell_width
            parts.append(_arrow(x + 3, x + gap - 4, y))
            if rank == ranks - 1:  # around to rank 0
                parts.append(_arrow(left - 20, left - 4, y))
    below = top + ranks * (cell_height + 4) + 30
    parts.append(text(10, below - 8, "The whole all-reduce, by its formula", font_weight="bold"))
    drawn, end = bars(seconds, {"ring": step * each}, 10, below + 4, WIDTH - 20)
    words = f"{title} ({ranks} ranks, {decimal_bytes(size)}, modelled). {does} {sizes} {so_far} " + ", ".join(
        f"{name} {duration(took)}" for name, took in seconds.items()
    )
    return Drawing("".join([*parts, drawn]), WIDTH, end + 6, words)


def _arrow(start: float, end: float, y: float) -> str:
    """A short arrow to the right."""
    tip = f"{end:.1f},{y:.1f} {end - 6:.1f},{y - 4:.1f} {end - 6:.1f},{y + 4:.1f}"
    return (
        f'<line x1="{start:.1f}" y1="{y:.1f}" x2="{end - 5:.1f}" y2="{y:.1f}" stroke="{TEXT_COLOUR}" '
        f'stroke-width="2"/><polygon points="{tip}" fill="{TEXT_COLOUR}"/>'
    )
