"""How well the paced lab keeps its pace: all_reduce over sizes, ranks and links, measured over formula."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib import Pace, launch
from course_lib.cost import ring_all_reduce

SIZES_MB = (0.25, 1, 4, 16)
REPEATS = 5


def times(size: int) -> list[float]:
    """Seconds of each of a few all_reduces of `size` bytes."""
    tensor = torch.zeros(size // 4)
    dist.all_reduce(tensor)
    taken = []
    for _ in range(REPEATS):
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(tensor)
        taken.append(time.monotonic() - began)
    return taken


def run(build: Path) -> None:
    """Measure and print; a `*` marks runs that said themselves that they could not keep the pace."""
    print("Paced all_reduce, measured over formula (medians of rank 0; * = the run warned):")
    for gbps, latency_us in ((0.2, 0), (0.2, 1000), (1, 0), (1, 1000)):
        for ranks in (2, 4, 8):
            row = []
            for size_mb in SIZES_MB:
                size = int(size_mb * 1e6)
                run = launch(
                    times, ranks, args=(size,), pace=Pace(gbps, latency_us), timeout=100, progress=False
                )
                formula = ring_all_reduce(size, ranks, gbps=gbps, latency_us=latency_us)
                ratio = statistics.median(run.results[0]) / formula
                row.append(f"{size_mb:g} MB {ratio:.3f}{'*' if run.warnings else ' '}")
            print(f"  {gbps:g} Gbit/s, {latency_us:4d} µs, {ranks} ranks:  " + "  ".join(row))
