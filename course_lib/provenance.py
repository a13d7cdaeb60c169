"""Tensors that know where they come from, so that a collective shows who holds what.

A block is one piece of data. It is carried as a matrix of zeros with a one at [rank, chunk]: the rank that
had it first, and which of that rank's pieces it is. Sums and copies then tell by themselves whose pieces they
hold, whatever moved them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The (rank, chunk) of each piece that was added up in a block.
Block = frozenset[tuple[int, int]]
Holding = list[Block]

COLLECTIVES = (
    "broadcast",
    "reduce",
    "all_reduce",
    "scatter",
    "gather",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)


def blocks(chunks: int = 1, most: int = 8) -> Any:
    """In a rank: its own data in `chunks` pieces, a float tensor of shape [chunks, ranks, most]."""
    import torch
    import torch.distributed as dist

    from course_lib.devices import device

    mine = torch.zeros(chunks, dist.get_world_size(), most, device=device())
    mine[range(chunks), dist.get_rank(), range(chunks)] = 1
    return mine


def read(held: Any) -> Holding:
    """The blocks in a tensor of shape [..., ranks, chunks] or in a list of such; None holds nothing.

    Raises ValueError where a piece was added more than once, or is no piece at all.
    """
    if held is None:
        return []
    if isinstance(held, (list, tuple)):
        return [block for part in held for block in read(part)]
    found = []
    for matrix in held.reshape(-1, *held.shape[-2:]):
        if not set(matrix.unique().tolist()) <= {0.0, 1.0}:
            raise ValueError("a piece was added more than once: this is no single collective's result")
        found.append(frozenset((int(rank), int(chunk)) for rank, chunk in matrix.nonzero().tolist()))
    return found


def expected(collective: str, ranks: int, root: int = 0) -> tuple[list[Holding], list[Holding]]:
    """Who holds what before and after a collective, by rank. What a rank need not hold is empty.

    Raises ValueError for a collective that is not one of COLLECTIVES.
    """
    everyone = range(ranks)

    def whole(rank: int) -> Holding:
        return [frozenset({(rank, 0)})]

    def pieces(rank: int) -> Holding:
        return [frozenset({(rank, chunk)}) for chunk in everyone]

    def total(chunk: int) -> Block:
        return frozenset((rank, chunk) for rank in everyone)

    def only_root(holding: Holding) -> list[Holding]:
        return [holding if rank == root else [] for rank in everyone]

    own, cut = [whole(rank) for rank in everyone], [pieces(rank) for rank in everyone]
    collected = [block for holding in own for block in holding]
    table: dict[str, tuple[Sequence[Holding], Sequence[Holding]]] = {
        "broadcast": (own, [whole(root) for _ in everyone]),
        "reduce": (own, only_root([total(0)])),
        "all_reduce": (own, [[total(0)] for _ in everyone]),
        "scatter": (only_root(pieces(root)), [[frozenset({(root, rank)})] for rank in everyone]),
        "gather": (own, only_root(collected)),
        "all_gather": (own, [collected for _ in everyone]),
        "reduce_scatter": (cut, [[total(rank)] for rank in everyone]),
        "all_to_all": (cut, [[frozenset({(other, rank)}) for other in everyone] for rank in everyone]),
    }
    if collective not in table:
        raise ValueError(f"{collective!r} is not known; choose one of {', '.join(COLLECTIVES)}")
    before, after = table[collective]
    return list(before), list(after)
