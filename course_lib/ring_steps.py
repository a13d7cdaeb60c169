"""The ring on paper: whose contributions does each chunk hold, step by step, in one process.

    for state in ring_states(4): ...        # state[rank][chunk] is a Counter: {rank: how often it is in}

`ring` is one rank's part of an all-reduce, without any network: it yields the chunk that goes to the
right-hand neighbour and is given the one that came from the left. What a chunk is does not matter, as long as
chunks can be added: Counters here, tensors on real ranks.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

Chunks = list[Any]
Body = Callable[[Chunks, int, int], Generator[Any, Any, None]]
State = list[list[Counter]]


def sends(rank: int, step: int, ranks: int) -> int:
    """The number of the chunk that `rank` sends to its right-hand neighbour in `step`, from 0."""
    return (rank - step) % ranks


def receives(rank: int, step: int, ranks: int) -> int:
    """The number of the chunk that `rank` receives in `step`: what its left-hand neighbour sends."""
    return sends(rank - 1, step, ranks)


def steps(ranks: int) -> int:
    """How many steps an all-reduce around the ring has: n-1 to add up, n-1 to share."""
    return 2 * (ranks - 1)


def phase(step: int, ranks: int) -> str:
    """What a step, from 0, is part of: "reduce-scatter" or "all-gather"."""
    return "reduce-scatter" if step < ranks - 1 else "all-gather"


def ring(chunks: Chunks, rank: int, ranks: int) -> Generator[Any, Any, None]:
    """One rank's part of a ring all-reduce of `chunks`, in place; sends by `yield`."""
    for step in range(steps(ranks)):
        arrived = yield chunks[sends(rank, step, ranks)]
        mine = receives(rank, step, ranks)
        chunks[mine] = chunks[mine] + arrived if phase(step, ranks) == "reduce-scatter" else arrived


def start(ranks: int) -> State:
    """Before the first step: each chunk of a rank holds that rank's contribution, once."""
    return [[Counter({rank: 1}) for _ in range(ranks)] for rank in range(ranks)]


def states(body: Body, holdings: Sequence[Chunks]) -> list[list[Chunks]]:
    """Play all ranks of `body` in one process: what each holds before the first step and after each one.

    holdings: for each rank its chunks; they are left alone. All ranks must take the same number of steps.
    """
    held = copy.deepcopy([list(chunks) for chunks in holdings])
    parts = [body(chunks, rank, len(held)) for rank, chunks in enumerate(held)]
    seen = [copy.deepcopy(held)]
    outgoing: list[Any] = [next(part, None) for part in parts]
    while outgoing and any(chunk is not None for chunk in outgoing):
        arriving = copy.deepcopy([outgoing[-1], *outgoing[:-1]])
        outgoing = [_resume(part, chunk) for part, chunk in zip(parts, arriving, strict=True)]
        seen.append(copy.deepcopy(held))
    return seen


def _resume(part: Generator[Any, Any, None], arrived: Any) -> Any:
    """Give a rank what arrived; what it sends next, or None at its end."""
    try:
        return part.send(arrived)
    except StopIteration:
        return None


def ring_states(ranks: int) -> list[State]:
    """Every state of a ring all-reduce: 2(n-1) + 1 of them. ValueError for less than one rank."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be a whole number from 1 up, not {ranks!r}")
    return states(ring, start(ranks))


def complete(chunk: Counter, ranks: int) -> bool:
    """Whether a chunk holds each rank's contribution exactly once."""
    return chunk == Counter(range(ranks))
