"""Exercises 3.1 and 3.2: the two halves of a ring all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from course_lib.check import chapter03_pictures as pictures
from course_lib.check.lab import Lab, Outcome
from course_lib.check.registry import Hint, exercise
from course_lib.check.signatures import Signature, equals
from course_lib.pace import Pace

COUNTED = 120  # elements: divisible by 2, 3, 4 and 5 ranks
QUICK = Pace(gbps=5)  # records who sends to whom, and holds hardly anything back

SEND_FIRST = Hint(
    "It hangs",
    "`dist.send` waits until the receiver asks. If every rank sends first, nobody ever asks. Start to send "
    "with `sending = dist.isend(…)`, then `dist.recv(…)`, then `sending.wait()`.",
    fits=("deadlock", "endless loop"),
)


@exercise(
    "3.1",
    "Reduce-scatter around the ring",
    hints=(
        SEND_FIRST,
        Hint(
            "Which chunk goes when?",
            "Work back from the end. Chunk r has to be complete on rank r, so its last stop before that is "
            "rank r - 1, and its first is rank r + 1. In step s, from 0, rank r sends chunk `(rank - s - 1) "
            "% n` and adds what arrives to chunk `(rank - s - 2) % n`. Work on a copy of the tensor.",
            fits=(
                "the next rank's chunk",
                "its own chunk",
                "one step too many",
                "overwrites instead of adding",
                "the whole sum",
                "edits its input",
                "whole tensors travel",
                "not around the ring",
                "uneven bytes",
            ),
        ),
        Hint("What it should look like", "Four ranks, three steps.", picture=pictures.reduce_scatter),
    ),
)
def judge_reduce_scatter(lab: Lab, reduce_scatter: Callable) -> None:
    """Chunk r of the sum on rank r; (n-1)/n of the data from each rank, to one neighbour."""
    for nproc, length, dtype in (
        (3, 12, torch.float64),
        (4, 10, torch.float64),
        (2, 7, torch.int64),
        (4, 3, torch.float32),
    ):
        tensors = _tensors(nproc, length, dtype)
        outcome = lab.call(
            reduce_scatter, [(t,) for t in tensors], nproc, tried=f"{length} numbers, {_name(dtype)}"
        )
        total = torch.stack(tensors).sum(0)
        lab.same(
            outcome,
            list(total.tensor_split(nproc)),
            what="chunk r of the sum on rank r",
            local=[t.tensor_split(nproc)[rank] for rank, t in enumerate(tensors)],
            signatures=_misrouted(tensors, total) if nproc > 2 and length >= nproc else [],
        )
    lab.note("2, 3 and 4 ranks, also with chunks of unequal length: chunk r of the sum on rank r")
    _counted(lab, reduce_scatter, 4, [(t,) for t in _tensors(4, COUNTED, torch.float32)], COUNTED * 4)


def _misrouted(tensors: Sequence[Tensor], total: Tensor) -> list[Signature]:
    """What the usual mistakes of a reduce-scatter leave on each rank."""
    n = len(tensors)
    sums = total.tensor_split(n)
    return [
        equals(
            "the next rank's chunk",
            "Each rank ends with a finished chunk, but with chunk r + 1: this is the chapter's schedule. "
            "Here rank r is asked for chunk r, as in `dist.reduce_scatter`: every chunk has to start one "
            "rank earlier.",
            [sums[(rank + 1) % n] for rank in range(n)],
        ),
        equals(
            "its own chunk",
            "Rank r returns its own chunk r with nothing added. Either nothing was exchanged, or the sum is "
            f"in another chunk, or a step is missing: with {n} ranks there are {n - 1}, and the last one "
            "completes chunk r.",
            [t.tensor_split(n)[rank] for rank, t in enumerate(tensors)],
        ),
        equals(
            "the whole sum",
            "Each rank returns the whole sum. It is to keep its own chunk only.",
            [total] * n,
        ),
        equals(
            "overwrites instead of adding",
            "What arrives replaces what was there. In a reduce-scatter it has to be added.",
            around(tensors, n - 1, add=False),
        ),
    ]


def around(tensors: Sequence[Tensor], steps: int, add: bool = True) -> list[Tensor]:
    """Chunk r on rank r after so many steps of the exercise's schedule, played in one process."""
    n = len(tensors)
    held = [list(t.clone().tensor_split(n)) for t in tensors]
    for step in range(steps):
        moving = [held[rank][(rank - step - 1) % n].clone() for rank in range(n)]
        for rank in range(n):
            number = (rank - step - 2) % n
            arrived = moving[rank - 1]
            held[rank][number] = held[rank][number] + arrived if add else arrived
    return [held[rank][rank] for rank in range(n)]


@exercise(
    "3.2",
    "All-gather around the ring",
    hints=(
        SEND_FIRST,
        Hint(
            "The wrong chunks, or in the wrong places",
            "In the first step send your own chunk, and then always the one that has just arrived. In step "
            "s, from 0, what arrives at rank r is chunk `(rank - s - 1) % n`: put it in that place, not at "
            "the end.",
            fits=(
                "in order of arrival",
                "always its own chunk",
                "rotated",
                "its own chunk",
                "its own chunk repeated",
                "added up",
                "one step too many",
                "whole tensors travel",
                "not around the ring",
                "uneven bytes",
            ),
        ),
        Hint("What it should look like", "Four ranks, three steps.", picture=pictures.all_gather),
    ),
)
def judge_all_gather(lab: Lab, all_gather: Callable) -> None:
    """All chunks, in rank order, on every rank; n-1 chunks sent by each, to one neighbour."""
    for nproc, length, dtype in ((3, 4, torch.float64), (4, 3, torch.float32), (2, 5, torch.int64)):
        chunks = _tensors(nproc, length, dtype)
        outcome = lab.call(
            all_gather, [(c,) for c in chunks], nproc, tried=f"chunks of {length}, {_name(dtype)}"
        )
        lab.same(
            outcome,
            [torch.cat(chunks)] * nproc,
            what="all chunks, in the order of the ranks",
            inputs=chunks,
            signatures=_misplaced(chunks) if nproc > 2 else [],
        )
    lab.note("2, 3 and 4 ranks: every chunk in its place, on every rank")
    chunks = _tensors(4, COUNTED // 4, torch.float32)
    _counted(lab, all_gather, 4, [(c,) for c in chunks], COUNTED * 4)


def _misplaced(chunks: Sequence[Tensor]) -> list[Signature]:
    """What the usual mistakes of an all-gather leave on each rank."""
    n = len(chunks)
    everyone = range(n)

    def joined(order: Callable[[int], Sequence[int]]) -> list[Tensor]:
        return [torch.cat([chunks[number % n] for number in order(rank)]) for rank in everyone]

    return [
        equals(
            "in order of arrival",
            "Every chunk is there, in the order in which they arrived. Rank r's first arrival is chunk r - "
            "1, and belongs in place r - 1.",
            joined(lambda rank: [rank - step for step in everyone]),
        ),
        equals(
            "rotated",
            "Every chunk is there, but each rank begins with its own. Chunk i belongs in place i on every "
            "rank.",
            joined(lambda rank: [rank + step for step in everyone]),
        ),
        equals(
            "always its own chunk",
            "Each rank has its left-hand neighbour's chunk again and again: everybody sends its own chunk in "
            "every step. From the second step on, pass on what has just arrived.",
            joined(lambda rank: [rank if place == rank else rank - 1 for place in everyone]),
        ),
        equals(
            "always its own chunk",
            "Each rank has its left-hand neighbour's chunk again and again: everybody sends its own chunk in "
            "every step. From the second step on, pass on what has just arrived.",
            joined(lambda rank: [rank, *[rank - 1] * (n - 1)]),
        ),
        equals(
            "its own chunk",
            "Each rank returns its own chunk alone. All of them are asked for, one after the other.",
            chunks,
        ),
        equals(
            "its own chunk repeated",
            "Each rank returns its own chunk in every place: nothing was exchanged.",
            joined(lambda rank: [rank] * n),
        ),
        equals(
            "added up",
            "The chunks are added up. An all-gather only collects: what arrives is kept as it is.",
            [torch.stack(list(chunks)).sum(0)] * n,
        ),
    ]


def _counted(lab: Lab, answer: Callable, nproc: int, inputs: list[tuple], whole: int) -> None:
    """Count one half of a ring: (n-1)/n of `whole` bytes from each rank, to one neighbour alone."""
    outcome = lab.call(answer, inputs, nproc, pace=QUICK, tried="counting")
    by_send_and_recv(lab, outcome)
    sent, share = outcome.bytes_sent("send"), whole * (nproc - 1) // nproc
    messages = outcome.messages("send")
    lab.require(
        set(messages) != {nproc} or set(sent) != {whole},
        "one step too many",
        f"The result is right, and one step came too many: with {nproc} ranks, {nproc - 1} are enough.",
        expected=f"{nproc - 1} messages from each rank",
        got=f"by rank: {messages}",
    )
    _right_bytes(lab, sent, share)
    for rank in range(nproc):
        partners = {span.detail for span in outcome.run.spans if span.rank == rank and span.name == "send"}
        lab.require(
            len(partners) == 1 and partners <= {f"to {(rank + 1) % nproc}", f"to {(rank - 1) % nproc}"},
            "not around the ring",
            "The result is right, but it did not travel around the ring: each rank sends to one neighbour "
            "only.",
            expected=f"rank {rank} sends to {(rank + 1) % nproc}",
            got=f"rank {rank} sends {', '.join(sorted(partners)) or 'nothing'}",
            rank=rank,
        )
    lab.note(f"{nproc} ranks: each sends {share} bytes, {nproc - 1}/{nproc} of the data, to its neighbour")


def by_send_and_recv(lab: Lab, outcome: Outcome) -> None:
    """Refuse answers that let a collective do the work."""
    used = sorted({name for rank in outcome.collectives() for name in rank} - {"send", "recv", "barrier"})
    lab.require(
        not used,
        "uses a collective",
        f"`{', '.join(used)}` did the work. Here you are to build it yourself, from `isend`, `send` and "
        "`recv`.",
        expected="send and recv only",
        got=", ".join(used),
    )


def _right_bytes(lab: Lab, sent: Sequence[int], share: int) -> None:
    expected, got = f"{share} bytes from each rank", f"by rank: {list(sent)}"
    lab.require(
        len(set(sent)) == 1,
        "uneven bytes",
        "The result is right, but some ranks send more than others. In a ring all send the same.",
        expected=expected,
        got=got,
    )
    lab.require(
        sent[0] <= share,
        "whole tensors travel",
        f"The result is right, but each rank sends {sent[0] / share:.3g} times what a ring has to. Only one "
        "chunk travels in each step.",
        expected=expected,
        got=got,
    )
    lab.require(
        sent[0] == share, "too few bytes", "Each rank sends less than it has to.", expected=expected, got=got
    )


def _tensors(nproc: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    """One tensor a rank, all different: whole numbers, so that any order of adding gives the same."""
    made = []
    for rank in range(nproc):
        generator = torch.Generator().manual_seed(100 * length + rank)
        made.append(torch.randint(-50, 51, (length,), generator=generator).to(dtype))
    return made


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
