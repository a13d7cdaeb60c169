"""The paced lab: values as on gloo, times as by formula, counts as by arithmetic, and a word where that fails.

Times are compared with formulas within one run; nothing here asks for an absolute time.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paced_harness import RankFailed, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from course_lib import clock, spans
from course_lib.ledger import kept_pace
from course_lib.link import Link, plan
from course_lib.pace import Pace, install, verdict
from course_lib.paced_layers import paced, paced_mlp

MB = 2**20
FAST = Pace(gbps=20)


# Values: everything that gloo does comes out the same.


def every_collective() -> dict[str, Any]:
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(8.0) + 10 * rank
    out: dict[str, Any] = {}

    def keep(name: str, *tensors: torch.Tensor) -> None:
        out[name] = [tensor.clone() for tensor in tensors]

    x = mine.clone()
    dist.all_reduce(x)
    keep("all_reduce", x)
    x = mine.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    keep("all_reduce max", x)
    x = mine.clone().to(torch.bfloat16)
    dist.all_reduce(x)
    keep("all_reduce bf16", x)
    for root in range(n):
        x = mine.clone()
        dist.broadcast(x, root)
        keep(f"broadcast {root}", x)
        x = mine.clone()
        dist.reduce(x, root)
        # What the others hold after a reduce is not defined.
        keep(f"reduce {root}", x if rank == root else mine)
        parts = [torch.empty(8) for _ in range(n)] if rank == root else None
        dist.gather(mine, parts, dst=root)
        keep(f"gather {root}", *(parts or []))
        x = torch.empty(8)
        dist.scatter(x, [mine + i for i in range(n)] if rank == root else None, src=root)
        keep(f"scatter {root}", x)
    parts = [torch.empty(8) for _ in range(n)]
    dist.all_gather(parts, mine)
    keep("all_gather", *parts)
    x = torch.empty(8 * n)
    dist.all_gather_single(x, mine)
    keep("all_gather_single", x)
    x = torch.empty(8)
    dist.reduce_scatter(x, [mine + i for i in range(n)])
    keep("reduce_scatter", x)
    x = torch.empty(2)
    dist.reduce_scatter_single(x, torch.arange(2.0 * n) + rank)
    keep("reduce_scatter_single", x)
    x = torch.empty(2 * n)
    dist.all_to_all_single(x, torch.arange(2.0 * n) + 100 * rank)
    keep("all_to_all_single", x)
    with dist._coalescing_manager(async_ops=True) as manager:
        several = [mine.clone(), 2 * mine]
        for x in several:
            dist.all_reduce(x)
    manager.wait()
    keep("coalesced all_reduce", *several)
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    shared = [("from", rank)]
    dist.broadcast_object_list(shared, src=n - 1)
    gathered: list[Any] = [None] * n
    dist.gather_object(rank, gathered if rank == 0 else None, dst=0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, list("abcdefgh"[:n]) if rank == 0 else None, src=0)
    out["objects"] = (objects, shared, gathered, scattered)
    dist.barrier()
    return out


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


@pytest.mark.parametrize("pace", [FAST, Pace(), Pace(latency_us=100)], ids=str)
@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_every_collective_gives_what_gloo_gives(nproc: int, pace: Pace) -> None:
    assert same(run_ranks(every_collective, nproc, pace=pace), run_ranks(every_collective, nproc, pace=None))


def test_it_works_without_the_board_as_under_torchrun() -> None:
    ours = run_ranks(every_collective, 3, pace=FAST, board=False)
    assert same(ours, run_ranks(every_collective, 3, pace=None))


def every_message() -> list[Any]:
    rank, n = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % n, (rank - 1) % n
    out: list[Any] = []

    def keep(*tensors: torch.Tensor) -> None:
        out.extend(tensor.clone() for tensor in tensors)

    mine, theirs = torch.full((1000,), float(rank)), torch.empty(1000)
    sending = dist.isend(mine, right)
    assert dist.recv(theirs, left) == left
    sending.wait()
    keep(theirs)
    if rank == 0:
        for other in range(1, n):
            dist.send(mine + other, other, tag=other)
        for other in range(1, n):
            x = torch.empty(3)
            out.append(dist.recv(x, other, tag=7))
            keep(x)
        # Any source: each twice, waited for in the opposite order.
        pairs = [(torch.empty(2), torch.empty(2)) for _ in range(n - 1)]
        works = [(dist.irecv(a, tag=9), dist.irecv(b, tag=9)) for a, b in pairs]
        for first, second in reversed(works):
            second.wait()
            first.wait()
        got = sorted((x[0].item(), x[1].item()) for pair in pairs for x in pair)
        out.append(got)
        for sender in range(1, n):
            order = [x[1].item() for pair in pairs for x in pair if x[0].item() == sender]
            assert order == sorted(order), f"messages of rank {sender} overtook each other: {order}"
    else:
        x = torch.empty(1000)
        dist.recv(x, 0, tag=rank)
        keep(x)
        dist.send(torch.full((3,), float(rank)), 0, tag=7)
        for turn in range(2):
            dist.send(torch.tensor([float(rank), float(turn)]), 0, tag=9)
    received = [torch.empty(5) for _ in range(n)]
    ops = [dist.P2POp(dist.irecv, received[i], i) for i in range(n) if i != rank]
    ops += [dist.P2POp(dist.isend, torch.full((5,), float(rank)), i) for i in range(n) if i != rank]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    keep(*(received[i] for i in range(n) if i != rank))
    return out


@pytest.mark.parametrize("pace", [FAST, Pace(), Pace(latency_us=100)], ids=str)
def test_messages_arrive_as_on_gloo(pace: Pace) -> None:
    assert same(run_ranks(every_message, 3, pace=pace), run_ranks(every_message, 3, pace=None))


def async_and_subgroups() -> list[Any]:
    rank, n = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((1000,), float(rank + i)) for i in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    out: list[Any] = []
    futures = [work.get_future() for work in works]
    out.extend(future.wait()[0].clone() for future in futures)
    assert all(work.wait() and work.is_completed() and work.exception() is None for work in works)
    halves = [dist.new_group(list(range(0, n, 2))), dist.new_group(list(range(1, n, 2)))]
    half = halves[rank % 2]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=half)
    y = torch.tensor([float(rank)])
    dist.broadcast(y, group_src=1, group=half)
    parts = [torch.empty(1) for _ in range(n // 2)]
    dist.all_gather(parts, x + rank, group=half)
    z = torch.empty(1)
    if dist.get_rank(half) == 0:
        dist.send(torch.tensor([100.0 + rank]), group_dst=1, group=half)
    else:
        dist.recv(z, group_src=0, group=half)
        out.append(z)
    dist.barrier(group=half)
    dist.destroy_process_group(half)
    chained = torch.ones(4)
    then = dist.all_reduce(chained, async_op=True).get_future().then(lambda f: f.value()[0] / n)
    return [*out, x, y, *parts, then.wait()]


@pytest.mark.parametrize("pace", [FAST, Pace()], ids=str)
def test_async_and_subgroups_give_what_gloo_gives(pace: Pace) -> None:
    assert same(run_ranks(async_and_subgroups, 4, pace=pace), run_ranks(async_and_subgroups, 4, pace=None))


def mismatched_sizes() -> list[str]:
    messages = []
    work = dist.all_reduce(torch.ones(3, dtype=torch.int16), async_op=True)
    for wait in (work.wait, work.get_future().wait):
        with pytest.raises(RuntimeError) as caught:
            wait()
        messages.append(str(caught.value))
    x = torch.ones(3)
    dist.all_reduce(x)
    return [*messages, str(x[0].item())]


def test_an_error_of_gloo_reaches_whoever_waits_and_the_group_stays_usable() -> None:
    for first, second, after in run_ranks(mismatched_sizes, 2, pace=FAST):
        assert "scalar type" in first.lower() and "scalar type" in second.lower()
        assert after == "2.0"


def threads_after_the_end() -> list[str]:
    import threading

    dist.all_reduce(torch.ones(1000), async_op=True).get_future().wait()
    during = [thread.name for thread in threading.enumerate() if thread.name.startswith("paced")]
    assert len(during) == 2, during
    dist.destroy_process_group()
    time.sleep(0.05)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("paced")]
    with pytest.raises(ValueError, match="Default process group"):
        dist.all_reduce(torch.ones(1))
    store = dist.HashStore()
    dist.init_process_group("paced", store=store, rank=0, world_size=1)
    return left


def test_destroying_the_group_ends_its_threads() -> None:
    assert run_ranks(threads_after_the_end, 2, pace=FAST) == [[], []]


def one_rank_dies() -> str:
    if dist.get_rank() == 1:
        import os

        os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(100):
            dist.all_reduce(torch.ones(1000))
    return str(caught.value)


def test_a_rank_that_dies_is_an_error_for_the_others_not_a_hang() -> None:
    with pytest.raises(RankFailed, match="rank 1: ended without an answer"):
        run_ranks(one_rank_dies, 2, pace=FAST)
