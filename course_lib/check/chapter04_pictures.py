"""The pictures in the hints of chapter 04."""

from __future__ import annotations

from typing import Any

from course_lib.figure import rank_colour
from course_lib.simulate import simulate_step


def packing() -> str:
    """Six layers of 1 MiB, packed into buckets of 2 MiB from the last to the first, as SVG."""
    width, gap, top = 66, 6, 56
    parts = []
    for place in range(6):
        left = 10 + place * (width + gap)
        parts.append(
            f"<rect x='{left}' y='{top}' width='{width}' height='30' fill='{rank_colour(place // 2)}'/>"
            f"<text x='{left + width / 2}' y='{top + 20}' text-anchor='middle' fill='white'>"
            f"layer {5 - place}</text>"
        )
    for bucket in range(3):
        middle = 10 + (2 * bucket + 1) * (width + gap) - gap / 2
        parts.append(
            f"<text x='{middle}' y='{top + 52}' text-anchor='middle'>bucket {bucket}</text>"
            f"<text x='{middle}' y='{top + 70}' text-anchor='middle' fill='#707070'>2 MiB</text>"
        )
    return (
        "<svg viewBox='0 0 450 135' width='450' height='135' font-family='sans-serif' font-size='13'>"
        "<title>Layers 5 and 4 fill bucket 0, 3 and 2 bucket 1, 1 and 0 bucket 2.</title>"
        "<text x='10' y='20'>backward reaches the last layer first: gradients arrive left to right</text>"
        "<text x='10' y='40' fill='#707070'>1 MiB a layer; a bucket closes when it reaches its cap</text>"
        + "".join(parts)
        + "</svg>"
    )


def overlap() -> Any:
    """The timed model of exercise 4.2, without overlap and with it, as axes."""
    from course_lib.check.chapter04_ranks import TIMED, TIMED_PACE, layers_of
    from course_lib.plots import compare_timelines

    assert TIMED_PACE.gbps is not None
    both = [
        simulate_step(
            layers_of(TIMED), 2, TIMED_PACE.gbps, TIMED_PACE.latency_us, TIMED["cap_mb"], overlap=with_it
        )
        for with_it in (False, True)
    ]
    return compare_timelines(both, ["sent after backward", "sent as soon as full"])[0]


def cap_curve() -> Any:
    """The step of exercise 4.3 over the cap, as the simulator expects it, as axes."""
    from course_lib.check.chapter04_ranks import LINK, LINK_RANKS, link_model
    from course_lib.plots import sweep

    assert LINK.gbps is not None
    caps = [0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 25]
    seconds = [
        simulate_step(link_model(), LINK_RANKS, LINK.gbps, LINK.latency_us, cap).step_seconds for cap in caps
    ]
    return sweep(caps, None, seconds, title=f"The step over the cap: {LINK_RANKS} ranks, {LINK}")
