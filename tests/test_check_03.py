"""The exercises of chapter 03: solutions pass, and each known mistake is called by its name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from course_lib import rings
from course_lib.check import check
from course_lib.check.chapter03_link import crossing


@pytest.fixture(autouse=True)
def clean(request, tmp_path, monkeypatch):
    """Progress of its own for each test, and nothing left behind; matplotlib keeps its fonts' files open."""
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))
    if "picture" not in request.node.name:
        request.getfixturevalue("nothing_left")


def named(exercise: str, answer: Callable, diagnosis: str | None, seconds: float = 45) -> None:
    began = time.monotonic()
    result = check(exercise, answer)
    assert result.outcome == "not yet", result
    assert diagnosis is None or result.diagnosis == diagnosis, result
    assert result.message and result.hint and time.monotonic() - began < seconds


def place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def pass_on(outgoing: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One step around the ring."""
    rank, n = place()
    sending, arrived = dist.isend(outgoing.contiguous(), (rank + 1) % n), torch.empty_like(like)
    dist.recv(arrived, (rank - 1) % n)
    sending.wait()
    return arrived


# 3.1 Reduce-scatter


def scatter_by(*, first=1, more=0, keep=0, add=True, copy=True, scale=1.0, dtype=None) -> Callable:
    """A ring reduce-scatter, with whatever can be got wrong about it."""

    def reduce_scatter(tensor):
        rank, n = place()
        chunks = list((tensor.clone() if copy else tensor).tensor_split(n))
        for step in range(n - 1 + more):
            number = (rank - step - first - 1) % n
            arrived = pass_on(chunks[(rank - step - first) % n], chunks[number])
            if add:
                chunks[number] += arrived
            else:
                chunks[number] = arrived
        mine = chunks[(rank + keep) % n]
        mine = mine if scale == 1 else mine / n
        return mine if dtype is None else mine.to(dtype)

    return reduce_scatter


def whole_tensors(tensor):
    rank, n = place()
    total, passing = tensor.clone(), tensor
    for _ in range(n - 1):
        passing = pass_on(passing, passing)
        total += passing
    return total.tensor_split(n)[rank]


def through_the_hub(tensor):
    rank, n = place()
    total = tensor.clone()
    rings.star_all_reduce(total)
    return total.tensor_split(n)[rank]


def straight_to_its_owner(tensor):
    rank, n = place()
    chunks = tensor.clone().tensor_split(n)
    sending = [dist.isend(chunks[other], other) for other in range(n) if other != rank]
    for other in range(n):
        if other != rank:
            arrived = torch.empty_like(chunks[rank])
            dist.recv(arrived, other)
            chunks[rank].add_(arrived)
    for work in sending:
        work.wait()
    return chunks[rank]


def by_all_reduce(tensor):
    rank, n = place()
    total = tensor.clone()
    dist.all_reduce(total)
    return total.tensor_split(n)[rank]


def whole_sum(tensor):
    total = tensor.clone()
    rings.ring_all_reduce(total)
    return total


def send_first(tensor):
    rank, n = place()
    dist.send(tensor, (rank + 1) % n)
    dist.recv(torch.empty_like(tensor), (rank - 1) % n)
    return tensor


def stub(tensor):
    raise NotImplementedError("your code here")


def forever(*_):
    while True:
        pass


def test_the_right_reduce_scatter_passes():
    result = check("3.1", scatter_by())
    assert result.passed, result


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        (scatter_by(first=0, keep=1), "the next rank's chunk"),
        (scatter_by(first=0), "its own chunk"),
        (scatter_by(more=-1), "its own chunk"),
        (scatter_by(more=1), "one step too many"),
        (scatter_by(add=False), "overwrites instead of adding"),
        (scatter_by(copy=False), "edits its input"),
        (scatter_by(dtype=torch.float32), "wrong dtype"),
        (whole_sum, "the whole sum"),
        (whole_tensors, "whole tensors travel"),
        (through_the_hub, "uneven bytes"),
        (straight_to_its_owner, "not around the ring"),
        (by_all_reduce, "uses a collective"),
        (send_first, "deadlock"),
    ],
)
def test_a_wrong_reduce_scatter_is_named(answer, diagnosis):
    named("3.1", answer, diagnosis)


LAZY = [
    (lambda tensor: tensor, None),
    (lambda tensor: torch.zeros_like(tensor), None),
    (lambda tensor: torch.randn_like(tensor.double()), None),
    (lambda tensor: print(tensor), "nothing returned"),
    (lambda tensor: 3, "wrong type"),
    (lambda tensor: tensor.no_such_thing, "an error"),
    (lambda tensor: os._exit(3), "left early"),
    (lambda tensor: os.kill(os.getpid(), 11), "crash"),
    (forever, "endless loop"),
]


@pytest.mark.parametrize(("answer", "diagnosis"), LAZY)
def test_lazy_and_broken_reduce_scatters_end_in_a_message(answer, diagnosis):
    named("3.1", answer, diagnosis)


def lazy_chunk(kind: str) -> Callable:
    def reduce_scatter(tensor):
        rank, n = place()
        mine = tensor.tensor_split(n)[rank]
        if kind == "mean":
            return scatter_by(scale=0)(tensor)
        return {"zeros": torch.zeros_like(mine), "random": torch.randint_like(mine, 50)}[kind]

    return reduce_scatter


@pytest.mark.parametrize(("kind", "diagnosis"), [("zeros", "zeros"), ("random", None), ("mean", None)])
def test_a_lazy_chunk_of_the_right_shape_does_not_pass(kind, diagnosis):
    named("3.1", lazy_chunk(kind), diagnosis)


# 3.2 All-gather


def gather_by(*, own=False, order: Callable = lambda rank, step: rank - step, more=0) -> Callable:
    """A ring all-gather; order: the place of what arrived in a step, from 1, and of one's own, step 0."""

    def all_gather(chunk):
        rank, n = place()
        chunks = [torch.zeros_like(chunk) for _ in range(n)]
        passing = chunk
        chunks[order(rank, 0) % n] = chunk
        for step in range(1, n + more):
            passing = pass_on(chunk if own else passing, chunk)
            chunks[order(rank, step) % n] = passing
        return torch.cat(chunks)

    return all_gather


def accumulating(chunk):
    """Sends everything it has, in every step."""
    rank, n = place()
    whole = torch.zeros(n * chunk.numel(), dtype=chunk.dtype)
    pieces = whole.chunk(n)
    pieces[rank].copy_(chunk)
    for _ in range(n - 1):
        arrived = pass_on(whole, whole)
        whole.copy_(torch.where(arrived != 0, arrived, whole))
    return whole


def sent_to_all(chunk):
    rank, n = place()
    chunks = [chunk if other == rank else torch.empty_like(chunk) for other in range(n)]
    sending = [dist.isend(chunk, other) for other in range(n) if other != rank]
    for other in range(n):
        if other != rank:
            dist.recv(chunks[other], other)
    for work in sending:
        work.wait()
    return torch.cat(chunks)


def gathered_by_gloo(chunk):
    chunks = [torch.empty_like(chunk) for _ in range(dist.get_world_size())]
    dist.all_gather(chunks, chunk)
    return torch.cat(chunks)


def added_up(chunk):
    total = chunk.clone()
    rings.ring_all_reduce(total)
    return total


def test_the_right_all_gather_passes():
    result = check("3.2", gather_by())
    assert result.passed, result


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        (gather_by(order=lambda rank, step: step), "in order of arrival"),
        (gather_by(order=lambda rank, step: -step), "rotated"),
        (gather_by(own=True), "always its own chunk"),
        (gather_by(more=1), "one step too many"),
        (lambda chunk: torch.cat([chunk] * dist.get_world_size()), "its own chunk repeated"),
        (lambda chunk: chunk.clone(), "its own chunk"),
        (added_up, "added up"),
        (accumulating, "whole tensors travel"),
        (sent_to_all, "not around the ring"),
        (gathered_by_gloo, "uses a collective"),
        (send_first, "deadlock"),
    ],
)
def test_a_wrong_all_gather_is_named(answer, diagnosis):
    named("3.2", answer, diagnosis)


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [*LAZY[3:], (lambda c: torch.zeros(c.numel() * dist.get_world_size(), dtype=c.dtype), "zeros")],
)
def test_lazy_and_broken_all_gathers_end_in_a_message(answer, diagnosis):
    named("3.2", answer, diagnosis)


# 3.3 The crossing point


def star_and_ring(n, *, star_latency=2.0, star_way=2.0):
    return (2 * (n - 1) - star_latency) / (star_way * (n - 1) - 2 * (n - 1) / n)


def test_the_right_crossing_point_passes():
    result = check("3.3", crossing)
    assert result.passed, result
    assert "at half of your size star" in repr(result)


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        (lambda n, gbps, us: 8 * crossing(n, gbps, us), "bits, not bytes"),
        (lambda n, gbps, us: 1e6 * crossing(n, gbps, us), "microseconds, not seconds"),
        (lambda n, gbps, us: 1e3 * crossing(n, gbps, us), "milliseconds, not microseconds"),
        (lambda n, gbps, us: us * 1e-6 * gbps * 1e9 / 8, "the rule of thumb"),
        (lambda n, g, us: us * 125 * g * star_and_ring(n, star_way=1), "one way only"),
        (lambda n, g, us: us * 125 * g * star_and_ring(n, star_latency=1), "the star pays once"),
        (lambda n, g, us: us * 125 * g * star_and_ring(n, star_latency=0), "the ring's latency alone"),
        (lambda n, gbps, us: 61_000.0, "another formula"),
        (lambda n, gbps, us: float("nan"), "wrong type"),
        (lambda n, gbps, us: -1.0, "another formula"),
        (lambda n, gbps, us: print(n), "wrong type"),
        (lambda n, gbps, us: 1 / 0, "an error"),
        (forever, "endless loop"),
    ],
)
def test_a_wrong_crossing_point_is_named(answer, diagnosis):
    named("3.3", answer, diagnosis)


# 3.4 A pipelined ring


def waits_for_the_chunk(tensor):
    """Segments, but a chunk goes on only when all of it has come."""
    rank, n = place()
    chunks = [chunk.tensor_split(4) for chunk in tensor.tensor_split(n)]
    for step in range(2 * (n - 1)):
        mine = chunks[(rank - step - 1) % n]
        parts = [torch.empty_like(segment) for segment in mine]
        arriving = [dist.irecv(part, (rank - 1) % n) for part in parts]
        sending = [dist.isend(segment, (rank + 1) % n) for segment in chunks[(rank - step) % n]]
        for segment, part, work in zip(mine, parts, arriving, strict=True):
            work.wait()
            segment.copy_(segment + part if step < n - 1 else part)
        for work in sending:
            work.wait()


def whole_in_segments(tensor):
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        segments = passing.tensor_split(4)
        passing = torch.cat([pass_on(segment, segment) for segment in segments])
        total += passing
    tensor.copy_(total)


def never_waits_to_add(tensor):
    rings.ring_all_reduce(tensor)
    tensor /= dist.get_world_size()


def in_segments(tensor):
    rings.pipelined_ring_all_reduce(tensor, segment_bytes=32_000)


@pytest.mark.timing
def test_the_pipelined_ring_passes_and_is_compared_with_gloo():
    result = check("3.4", in_segments)
    assert result.passed, result
    assert "of the plain ring's time" in repr(result) and "of gloo's own" in repr(result)


@pytest.mark.timing
@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        (rings.ring_all_reduce, "no segments"),
        (waits_for_the_chunk, "nothing ahead"),
        (whole_in_segments, "whole tensors travel"),
        (never_waits_to_add, None),
        (lambda tensor: dist.all_reduce(tensor), "uses a collective"),
        (lambda tensor: tensor.mul_(dist.get_world_size()), None),
        (lambda tensor: tensor.mul_(1), "never synchronised"),
        (lambda tensor: tensor.zero_(), "zeros"),
        (send_first, "deadlock"),
        (forever, "endless loop"),
    ],
)
def test_a_wrong_pipelined_ring_is_named(answer, diagnosis):
    named("3.4", answer, diagnosis, seconds=70)


# All of them


@pytest.mark.parametrize("name", ["3.1", "3.2", "3.3", "3.4"])
def test_a_stub_is_not_attempted_and_hints_end_in_a_picture(name):
    def untouched(*_):
        raise NotImplementedError("your code here")

    assert check(name, untouched).outcome == "not attempted"
    hints = [check.hint(name, number) for number in (1, 2, 3)]
    assert len({hint.hint.title for hint in hints}) == 3
    assert "<svg" in hints[-1]._repr_html_() or "<img" in hints[-1]._repr_html_()
