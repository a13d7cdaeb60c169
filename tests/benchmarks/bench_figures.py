"""How long a learner waits for a picture: the figures that a slider redraws."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")


def milliseconds_of(draw, repeats: int = 9) -> float:
    """The median time of `draw`, in milliseconds, after one call to warm up."""
    draw()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        draw()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def run(build: Path) -> None:
    """Measure and print."""
    from course_lib.explorer import BucketExplorer
    from course_lib.simulate import Layer, simulate_step

    layers = [Layer(f"layer {i}", (2**20,), 0.004, 0.008) for i in range(100)]
    took = milliseconds_of(lambda: simulate_step(layers, 1024, 10, 20, bucket_cap_mb=1))
    print("Pictures and sliders (milliseconds, medians):")
    print(f"  simulating 1,024 ranks with 100 buckets {took:8.2f}")
    explorer = BucketExplorer(layers[:12], ranks=4)

    def move() -> None:
        explorer.cap.value = 4 if explorer.cap.value != 4 else 8

    print(f"  one move of the bucket explorer's slider {milliseconds_of(move):7.1f}")
