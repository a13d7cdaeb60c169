"""What the probe costs: the same steps with and without it, in pairs, within one job.

Blocks of steps alternate between a watched and an unwatched model, so that whatever else the machine does
hits both alike; the figure is the median of the pairs' ratios.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from course_lib import Pace, launch, probe

PAIRS, STEPS = 40, 4


def pairs(kind: str) -> list[tuple[float, float]]:
    """Seconds of a block of steps, watched and unwatched, for each pair."""
    from course_lib.paced_layers import paced_mlp
    from course_lib.tasks import mlp

    def prepare(watched: bool):
        model = paced_mlp(6, 256, 2, 4) if kind == "paced" else mlp(hidden=(512, 512), seed=0)
        model = DistributedDataParallel(model, bucket_cap_mb=0.5)
        if watched:
            probe(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs = torch.randn(256, 256 if kind == "paced" else 64)

        def block() -> float:
            began = time.perf_counter()
            for _ in range(STEPS):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            return time.perf_counter() - began

        return block

    unwatched = prepare(False)
    for _ in range(3):
        unwatched()
    # The optimizer hooks are global: measured blocks of the unwatched model pay for them too, which is
    # why a first round runs before anything is watched.
    plain = [unwatched() for _ in range(PAIRS)]
    watched = prepare(True)
    for _ in range(3):
        watched()
    alternating = []
    for index in range(PAIRS):
        first, second = (watched, unwatched) if index % 2 else (unwatched, watched)
        a, b = first(), second()
        alternating.append((a, b) if index % 2 else (b, a))
    return [*alternating, (statistics.median(plain), statistics.median(plain))]


def run(build: Path) -> None:
    """Measure and print."""
    print("What the probe costs a step (2 ranks, paired blocks, median):")
    for kind, pace in (("measured", None), ("paced", Pace(gbps=0.5, latency_us=50))):
        found = launch(pairs, 2, args=(kind,), pace=pace, timeout=170, progress=False).results[0][:-1]
        ratio = statistics.median(watched / unwatched for watched, unwatched in found)
        step = statistics.median(unwatched for _, unwatched in found) / STEPS * 1e3
        verdict = "holds" if ratio <= 1.02 else "DOES NOT HOLD"
        print(f"  {kind:<10}{step:7.2f} ms a step, {100 * (ratio - 1):+5.1f} %   {verdict}: at most 2 %")
