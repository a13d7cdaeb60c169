"""All-reduce by send and recv, as it could be written on any network: star, tree, ring, halving-doubling.

    def job():
        gradients = torch.ones(1000)
        ring_all_reduce(gradients)          # in place, as dist.all_reduce: every rank holds the sum

    launch(job, nproc=4, pace=Pace())

Each works on the ranks of the default process group, leaves the sum over ranks in `tensor` on every rank, the
same to the last bit, and takes the time that its formula in `cost` says. They take any contiguous CPU tensor,
of any length, also one shorter than there are ranks: then some chunks are empty, and so are some messages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

AllReduce = Callable[[Tensor], object]

# Long enough that Python's share of a message is small, short enough that adding overlaps with receiving.
SEGMENT_BYTES = 3 * 2**20
POSTED_AHEAD = 2


def _flat(tensor: Tensor) -> Tensor:
    """`tensor` as one row, sharing its memory. ValueError where its elements do not lie side by side."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, and "
            "these all-reduces send stretches of its memory: pass tensor.contiguous()"
        )
    return tensor.detach().view(-1)


def _isend(tensor: Tensor, destination: int, tag: int = 0) -> dist.Work:
    """Start to send."""
    work = dist.isend(tensor, destination, tag=tag)
    assert work is not None  # it is only on a rank outside of the group
    return work


def _irecv(tensor: Tensor, source: int, tag: int = 0) -> dist.Work:
    """Start to receive."""
    work = dist.irecv(tensor, source, tag=tag)
    assert work is not None
    return work


def _place() -> tuple[int, int]:
    """This rank, and how many there are."""
    return dist.get_rank(), dist.get_world_size()


def star_all_reduce(tensor: Tensor) -> None:
    """Rank 0 takes in every rank's tensor, adds them, and sends everyone the sum. DP's pattern."""
    rank, n = _place()
    whole = _flat(tensor)
    if rank > 0:
        dist.send(whole, 0)
        dist.recv(whole, 0)
        return
    parts = [torch.empty_like(whole) for _ in range(1, n)]
    arriving = [_irecv(part, other) for other, part in enumerate(parts, start=1)]
    for work, part in zip(arriving, parts, strict=True):
        work.wait()
        whole += part
    for work in [_isend(whole, other) for other in range(1, n)]:
        work.wait()


def tree_all_reduce(tensor: Tensor) -> None:
    """Sum up a binomial tree to rank 0, then send the sum back down: whole tensors, in few rounds.

    Where the ranks are no power of two, some messages of two rounds fly side by side: its formula is then an
    upper bound.
    """
    rank, n = _place()
    whole = _flat(tensor)
    distance, children = 1, []
    while distance < n and rank % (2 * distance) == 0:
        if rank + distance < n:
            children.append(rank + distance)
        distance *= 2
    for child in children:
        part = torch.empty_like(whole)
        dist.recv(part, child)
        whole += part
    if rank > 0:
        dist.send(whole, rank - distance)
        dist.recv(whole, rank - distance)
    for child in reversed(children):
        dist.send(whole, child)


def ring_all_reduce(tensor: Tensor) -> None:
    """Pass chunks around the ring: once to add them up (reduce-scatter), once to share the sums (all-gather).

    Each rank sends 2(n-1) messages of 1/n of the tensor, to its right-hand neighbour only.
    """
    rank, n = _place()
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = _flat(tensor).tensor_split(n)
    buffer = torch.empty_like(chunks[0])  # tensor_split makes the first chunks the larger ones
    for step in range(2 * (n - 1)):
        outgoing, mine = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        sending = _isend(outgoing, right)
        if step < n - 1:
            arrived = buffer[: mine.numel()]
            dist.recv(arrived, left)
            mine += arrived
        else:
            dist.recv(mine, left)
        sending.wait()


def halving_doubling_all_reduce(tensor: Tensor) -> None:
    """Swap halves with ever nearer ranks, adding, until each has summed 1/n; then go back, doubling.

    The ring's bytes in 2 log2(n) rounds (Rabenseifner). ValueError unless n is a power of two.
    """
    rank, n = _place()
    if n & (n - 1):
        raise ValueError(
            f"halving-doubling pairs ranks off round by round: it takes 2, 4, 8 … ranks, not {n}. "
            "ring_all_reduce takes any number."
        )
    mine, rounds, distance = _flat(tensor), [], n // 2
    while distance:
        lower, upper = mine.tensor_split(2)
        mine, others = (upper, lower) if rank & distance else (lower, upper)
        arrived = torch.empty_like(mine)
        _swap(others, arrived, rank ^ distance)
        mine += arrived
        rounds.append((mine, others, rank ^ distance))
        distance //= 2
    for mine, others, partner in reversed(rounds):
        _swap(mine, others, partner)


def _swap(outgoing: Tensor, incoming: Tensor, partner: int) -> None:
    """Send to a rank while receiving from it."""
    sending = _isend(outgoing, partner)
    dist.recv(incoming, partner)
    sending.wait()


def pipelined_ring_all_reduce(
    tensor: Tensor, segment_bytes: int = SEGMENT_BYTES, posted_ahead: int = POSTED_AHEAD
) -> None:
    """The ring, with each chunk cut into segments that are passed on as soon as they are there.

    While one segment is being added, the next is already on its way: its receive was posted ahead, so that
    its sender need not wait. Sends the same bytes as `ring_all_reduce`, in more messages. On a link whose
    latency is shorter than a chunk's time, it pays about one latency in place of 2(n-1).

    segment_bytes: about how long a segment is; a chunk has two at least. posted_ahead: how many receives wait
    at once.
    """
    rank, n = _place()
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = _flat(tensor).tensor_split(n)
    if n == 1:
        return
    count = max(2, round(chunks[0].nbytes / segment_bytes))
    segments = [chunk.tensor_split(count) for chunk in chunks]
    to_add = [s for step in range(n - 1) for s in segments[(rank - step - 1) % n]]
    to_keep = [s for step in range(n - 1) for s in segments[(rank - step) % n]]
    buffers = [torch.empty_like(segments[0][0]) for _ in range(posted_ahead)]

    def arrive(i: int) -> tuple[Tensor, dist.Work]:
        """Post the receive of what is to be added to segment `i`."""
        part = buffers[i % posted_ahead][: to_add[i].numel()]
        return part, _irecv(part, left)

    arriving = [arrive(i) for i in range(min(posted_ahead, len(to_add)))]
    # Sums have a tag of their own (1), so that these receives can wait from the start. They may not land on a
    # chunk that is still to be sent, and cannot: its sum comes only after it has been all around the ring.
    sums = [_irecv(segment, left, tag=1) for segment in to_keep]
    sending = [_isend(segment, right) for segment in segments[rank]]
    for i, segment in enumerate(to_add):
        part, work = arriving[i]
        work.wait()
        segment += part
        if i + posted_ahead < len(to_add):
            arriving.append(arrive(i + posted_ahead))
        is_sum = i >= len(to_add) - count
        sending.append(_isend(segment, right, tag=int(is_sum)))
    for i, (segment, work) in enumerate(zip(to_keep, sums, strict=True)):
        work.wait()
        if i < len(to_keep) - count:
            sending.append(_isend(segment, right, tag=1))
    for work in sending:
        work.wait()


ALGORITHMS: dict[str, AllReduce] = {
    "star": star_all_reduce,
    "tree": tree_all_reduce,
    "ring": ring_all_reduce,
    "halving-doubling": halving_doubling_all_reduce,
}


def time_all_reduces(
    all_reduces: Mapping[str, AllReduce], sizes: Sequence[int], repeats: int = 3
) -> dict[str, list[list[float]]]:
    """In a rank: seconds of each of `all_reduces`, by name, of tensors of `sizes` bytes, as [size][repeat].

    The ranks start each one together, after a barrier, and check the sum after it (float32; whole numbers, so
    exact). Give what the ranks return to `slowest`.
    """
    rank, n = _place()
    taken: dict[str, list[list[float]]] = {}
    for name, all_reduce in all_reduces.items():
        for size in sizes:
            seconds = []
            for _ in range(repeats):
                tensor = torch.full((size // 4,), rank + 1.0)
                dist.barrier()
                began = time.perf_counter()
                all_reduce(tensor)
                seconds.append(time.perf_counter() - began)
                if not torch.equal(tensor, torch.full_like(tensor, n * (n + 1) / 2)):
                    raise AssertionError(f"{name} of {size} bytes did not leave the sum on rank {rank}")
            taken.setdefault(name, []).append(seconds)
    return taken


def slowest(results: Sequence[Mapping[str, Sequence[Sequence[float]]]]) -> dict[str, list[list[float]]]:
    """By name, as [size][repeat], the seconds of the slowest rank: all is done when the last rank is.

    results: what `time_all_reduces` returned on each rank, such as `run.results`.
    """
    return {
        name: [
            [max(repeat) for repeat in zip(*size, strict=True)]
            for size in zip(*(result[name] for result in results), strict=True)
        ]
        for name in results[0]
    }


def medians(times: Sequence[Sequence[float]]) -> list[float]:
    """The middle of each list of repeats."""
    return [statistics.median(repeats) for repeats in times]
