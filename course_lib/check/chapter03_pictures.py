"""What the answers to chapter 03's exercises should look like: the pictures of the last hints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from typing import Any

from course_lib.ring_picture import WIDTH, Drawing, box, film, text
from course_lib.ring_steps import states


def reduce_scatter() -> str:
    """Four ranks that end with chunk r of the sum on rank r."""

    def body(chunks: list, rank: int, n: int) -> Generator[Any, Any, None]:
        for step in range(n - 1):
            arrived = yield chunks[(rank - step - 1) % n]
            mine = (rank - step - 2) % n
            chunks[mine] = chunks[mine] + arrived

    held = [[Counter({rank: 1}) for _ in range(4)] for rank in range(4)]
    return film(states(body, held), "After three steps, chunk r is complete on rank r").svg


def all_gather() -> str:
    """Four ranks that start with a finished chunk each."""

    def body(chunks: list, rank: int, n: int) -> Generator[Any, Any, None]:
        for step in range(n - 1):
            arrived = yield chunks[(rank - step) % n]
            chunks[(rank - step - 1) % n] = arrived

    everyone = Counter(range(4))
    held = [[everyone if chunk == rank else Counter() for chunk in range(4)] for rank in range(4)]
    return film(states(body, held), "Each chunk is passed on until everyone has it").svg


def crossing() -> Any:
    """Star and ring over the size, and where they cross."""
    from course_lib import cost
    from course_lib.algorithm_plots import algorithms

    ranks, gbps, latency_us = 8, 0.05, 10_000
    sizes = [1000 * 2 ** (i / 4) for i in range(4, 40)]
    formulas = {"star": cost.star_all_reduce, "ring": cost.ring_all_reduce}
    lines = {name: (sizes, [f(s, ranks, gbps, latency_us) for s in sizes]) for name, f in formulas.items()}
    meet = min(sizes, key=lambda s: abs(formulas["star"](s, ranks, gbps, latency_us) /
                                        formulas["ring"](s, ranks, gbps, latency_us) - 1))  # fmt: skip
    ticks = [4_000, 16_000, 64_000, 256_000]
    title = "8 ranks, 0.05 Gbit/s, 10 ms: find this place by arithmetic"
    return algorithms(ticks, {}, lines, mark=(meet, "they cross here"), title=title, kind="modelled")


def pipeline() -> str:
    """One rank's egress: with whole chunks it idles a latency in each step, with segments it does not."""
    chunk, latency, count, steps, left = 60.0, 45.0, 4, 6, 120.0
    parts = [text(10, 20, "What one rank's link sends, four ranks", font_weight="bold", font_size=13)]
    for row, name in enumerate(("whole chunks", "segments")):
        y = 40 + 50 * row
        parts.append(text(left - 10, y + 20, name, text_anchor="end", font_size=11))
        for step in range(steps):
            fill = "#0072B2" if step < steps // 2 else "#56B4E9"
            if row == 0:
                parts.append(box(left + step * (chunk + latency), y, chunk, 30, fill, stroke="white"))
            else:
                for segment in range(count):
                    x = left + step * chunk + segment * chunk / count
                    parts.append(box(x, y, chunk / count, 30, fill, stroke="white"))
    parts.append(text(left + chunk + 4, 60, "latency", font_size=10))
    legend = "dark: chunks being added up; light: finished sums. Time runs to the right."
    parts.append(text(left, 150, legend, font_size=11))
    words = "With whole chunks the link idles one latency in each step; with segments it does not idle."
    return Drawing("".join(parts), WIDTH, 165, words).svg
