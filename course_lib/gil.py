"""The GIL experiment: the same work in Python and in C, in two threads and in two processes.

    result = gil_experiment()
    result["Python", "threads"].at_once       # about 1: one thread at a time executes Python
    result["C", "threads"].at_once            # about 2: PyTorch lets go of the lock while it computes
    result["C", "threads"].speedup            # what that gained on this machine, just now

Each worker repeats a small piece of work for a fixed time. `speedup` is how much two workers got done over
what one did alone: 2 where they do not disturb each other and each has a core, 1 where they only take turns.
On a busy machine it says more about the machine than about Python. `at_once` does not: it is how many of the
two were running or queueing for a core, on average, and so were not waiting for each other. All of it runs in
processes of its own, with one compute thread each, so that the notebook's settings play no part.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from course_lib.hardware import usable_cores
from course_lib.launch import launch

PYTHON, C = "Python", "C"
THREADS, PROCESSES = "threads", "processes"
WORKERS = 2
CORES_NEEDED = 2
SECONDS = 0.12
_SWITCH_SECONDS = 0.02
_LOOPS, _WIDTH = 4000, 200
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class Gain:
    """What `WORKERS` workers were to one, in each round.

    alone, together: pieces of work done in `SECONDS` by one worker, and by all. busy: how many of them were
    running or queueing for a core, on average.
    """

    alone: tuple[float, ...]
    together: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def speedup(self) -> float:
        """That of the best rounds, which other work on the machine disturbed least."""
        return max(self.together) / max(self.alone)

    @property
    def at_once(self) -> float:
        """How many workers could go on at once: of the median round."""
        return statistics.median(self.busy)


class GilResult(Mapping[tuple[str, str], Gain]):
    """The four gains, by (work, workers), such as ("Python", "threads"). Shows itself as a table."""

    kind = "measured"

    def __init__(self, gains: Mapping[tuple[str, str], Gain], cores: int) -> None:
        self._gains, self.cores = dict(gains), cores

    def __getitem__(self, key: tuple[str, str]) -> Gain:
        return self._gains[key]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._gains)

    def __len__(self) -> int:
        return len(self._gains)

    @property
    def note(self) -> str:
        """What this machine lacks for the experiment; empty where it has what it needs."""
        if self.cores >= CORES_NEEDED:
            return ""
        return (
            f"A speed-up needs {CORES_NEEDED} cores, and this machine lets you use {self.cores}. It stays "
            "near 1 here, whatever the work is; look at how many workers could go on at once instead."
        )

    def __repr__(self) -> str:
        lines = [
            f"{work:7} in {WORKERS} {how:10} {gain.at_once:.1f} at once, {gain.speedup:.2f} times one"
            for (work, how), gain in self.items()
        ]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def _repr_html_(self) -> str:
        left = " style='text-align:left'"
        rows = "".join(
            f"<tr><th scope='row'{left}>{work} in {WORKERS} {how}</th>"
            f"<td>{gain.at_once:.1f}</td><td>{gain.speedup:.2f}</td></tr>"
            for (work, how), gain in self.items()
        )
        heads = "".join(f"<th scope='col'>{name}</th>" for name in ("", "workers at once", "speed-up"))
        note = f"<p><b>Note.</b> {escape(self.note)}</p>" if self.note else ""
        return f"<table><tr>{heads}</tr>{rows}</table>{note}"


def python_work() -> int:
    """A piece of plain Python, which holds the GIL throughout."""
    total = 0
    for number in range(_LOOPS):
        total += number * number & 7
    return total


def c_work() -> Any:
    """A matrix product, during which PyTorch holds no lock."""
    import torch

    matrix = torch.ones(_WIDTH, _WIDTH)
    return torch.mm(matrix, matrix)


WORK: dict[str, Callable] = {PYTHON: python_work, C: c_work}


def _demand() -> float:
    """Seconds that this thread has run or queued for a core; without Linux's books only those it has run."""
    try:
        queued = int(_SCHEDSTAT.read_text().split()[1]) * 1e-9
    except OSError:
        queued = 0.0
    return time.thread_time() + queued


def _repeat(work: Callable) -> tuple[int, float]:
    """Do the work for `SECONDS`: how often, and the share of that time in which this thread ran or queued."""
    start, demand = time.perf_counter(), _demand()
    done = 0
    while time.perf_counter() - start < SECONDS:
        work()
        done += 1
    return done, min(1.0, (_demand() - demand) / (time.perf_counter() - start))


def _in_threads(work: Callable) -> tuple[float, float]:
    """The work in two threads at once: how often it was done, and how many could go on at once."""
    gate = threading.Barrier(WORKERS)
    found: list[tuple[int, float]] = []

    def worker() -> None:
        gate.wait()
        found.append(_repeat(work))

    threads = [threading.Thread(target=worker) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done for done, _ in found), sum(share for _, share in found)


def _in_ranks(work: Callable) -> tuple[float, float]:
    """The same with one worker a rank."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    both = torch.tensor(_repeat(work), dtype=torch.float64)
    dist.all_reduce(both)
    return float(both[0]), float(both[1])


def _measure(rounds: int) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """On each rank: (alone, together, busy) of every round. Rank 1 is there for the two processes only."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A thread that waits for the GIL wakes this often to ask for it. On a busy machine each time it has to
    # queue for a core first, which would look like work.
    sys.setswitchinterval(_SWITCH_SECONDS)
    first = dist.get_rank() == 0
    for work in WORK.values():
        work()  # the first call of anything is slow
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        # What else this machine does goes on through all parts of a round.
        for name, work in WORK.items():
            alone = _repeat(work)[0] if first else 0.0
            threads = _in_threads(work) if first else (0.0, 0.0)
            found.setdefault((name, THREADS), []).append((alone, *threads))
            found.setdefault((name, PROCESSES), []).append((alone, *_in_ranks(work)))
    return found


def gil_experiment(rounds: int = 4) -> GilResult:
    """Measure Python work and C work, in two threads and in two processes, on this machine as it is.

    Takes about three seconds. The result's `note` says what is missing where there is one core.
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"rounds={rounds!r}: give a whole number from 1 on")
    run = launch(_measure, WORKERS, kwargs={"rounds": rounds}, backend="gloo", progress=False)
    gains = {key: Gain(*zip(*triples, strict=True)) for key, triples in run.results[0].items()}
    return GilResult(gains, usable_cores())
