"""Rings by hand against gloo's own all_reduce, as this machine is, and how quickly the ring player steps."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib import launch
from course_lib.cost import bus_bandwidth
from course_lib.ring_player import RingPlayer
from course_lib.rings import pipelined_ring_all_reduce, ring_all_reduce

SIZES_MB = (1, 8, 25)
REPEATS = 41


def in_turn(size: int, repeats: int) -> list[dict[str, float]]:
    """Seconds of one all-reduce of `size` bytes by each of the three, one after the other, in each round."""
    contenders = {
        "gloo": dist.all_reduce,
        "plain": ring_all_reduce,
        "pipelined": pipelined_ring_all_reduce,
    }
    tensor, rounds = torch.zeros(size // 4), []
    names = list(contenders)
    for number in range(repeats + 2):
        taken = {}
        # Another order in each round: whoever is disturbed, it is not always the same one.
        for name in names[number % 3 :] + names[: number % 3]:
            dist.barrier()
            began = time.perf_counter()
            contenders[name](tensor)
            taken[name] = time.perf_counter() - began
        rounds.append(taken)
    return rounds[2:]


def compare(ranks: int, size: int, repeats: int = REPEATS) -> dict[str, float]:
    """Bus bandwidth of gloo in bytes a second, and that of the rings over it: medians over rounds."""
    by_rank = launch(in_turn, ranks, args=(size, repeats), timeout=120, progress=False).results
    # An all-reduce is done when its last rank is.
    rounds = [
        {name: max(one[name] for one in same) for name in same[0]} for same in zip(*by_rank, strict=True)
    ]
    gloo = statistics.median(one["gloo"] for one in rounds)
    ratios = {
        name: statistics.median(one["gloo"] / one[name] for one in rounds) for name in ("plain", "pipelined")
    }
    return {"gloo": bus_bandwidth(size, gloo, ranks), **ratios}


def player_step_ms(steps: int = 28) -> float:
    """The median time of one step of the ring player with 8 ranks, the drawing included, in milliseconds."""
    player, taken = RingPlayer(ranks=8), []
    for number in range(steps):
        began = time.perf_counter()
        player.go(1 + number % player.step.max)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3


def run(build: Path) -> None:
    """Measure and print."""
    print("All-reduce by hand over gloo's own, unpaced (bus bandwidth; medians of rounds in turn):")
    for ranks in (2, 4):
        for size_mb in SIZES_MB:
            found = compare(ranks, size_mb * 1_000_000)
            print(
                f"  {ranks} ranks, {size_mb:2d} MB: gloo {found['gloo'] / 1e9:.2f} GB/s,  "
                f"plain ring {found['plain']:.2f},  pipelined ring {found['pipelined']:.2f}"
            )
    print(f"One step of the ring player with 8 ranks: {player_step_ms():.1f} ms")
