"""The exercises of chapter 04: solutions pass, and each known mistake is called by its name."""

from __future__ import annotations

import os
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.buckets import assign_buckets
from course_lib.check import check
from course_lib.check.chapter04_cap import best_cap

# Answers travel by value, as they do from a notebook: a rank does not import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("own_progress")


@pytest.fixture(autouse=True)
def nothing_of_a_job_is_left(request):
    if "hint" not in request.node.name:  # matplotlib keeps its fonts open
        request.getfixturevalue("nothing_left")


@pytest.fixture
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))


def sizes_by(model, cap_mb, *, order=-1, frozen=False, strict=False, unit=2**20, early=False, itemsize=None):
    """DDP's rule, with whatever can be got wrong about it."""
    buckets, filled = [], 0
    for parameter in list(model.parameters())[::order]:
        if not (parameter.requires_grad or frozen):
            continue
        size = parameter.nbytes if itemsize is None else parameter.numel() * itemsize
        limit = cap_mb * unit
        if early and filled and filled + size > limit:
            buckets.append(filled)
            filled = 0
        filled += size
        if not early and (filled > limit if strict else filled >= limit):
            buckets.append(filled)
            filled = 0
    return buckets + ([filled] if filled else [])


def split_at_the_cap(model, cap_mb):
    total, cap = sum(p.nbytes for p in model.parameters() if p.requires_grad), int(cap_mb * 2**20)
    return [cap] * (total // cap) + ([total % cap] if total % cap else [])


def tied_twice(model, cap_mb):
    parameters = [p for layer in model for p in layer.parameters() if p.requires_grad]
    sizes = [p.nbytes for p in parameters]
    return [sum(sizes[i] for i in bucket) for bucket in assign_buckets(sizes, cap_mb)]


def default_first(model, cap_mb):
    sizes = [p.nbytes for p in model.parameters() if p.requires_grad]
    first = assign_buckets(sizes, 1.0)[0]
    rest = sizes[: len(sizes) - len(first)]
    return [sum(sizes[i] for i in first), *(sum(rest[i] for i in b) for b in assign_buckets(rest, cap_mb))]


MISREAD = {
    "forward order": lambda m, cap: sizes_by(m, cap, order=1),
    "frozen parameters counted": lambda m, cap: sizes_by(m, cap, frozen=True),
    "above the cap": lambda m, cap: sizes_by(m, cap, strict=True),
    "closed too early": lambda m, cap: sizes_by(m, cap, early=True),
    "MB, not MiB": lambda m, cap: sizes_by(m, cap, unit=1e6),
    "elements, not bytes": lambda m, cap: sizes_by(m, cap, itemsize=1),
    "four bytes assumed": lambda m, cap: sizes_by(m, cap, itemsize=4),
    "parameters split": split_at_the_cap,
    "the shared weight twice": tied_twice,
    "MiB, not bytes": lambda m, cap: [size / 2**20 for size in sizes_by(m, cap)],
    "the last bucket is missing": lambda m, cap: sizes_by(m, cap)[:-1],
    "one bucket": lambda m, cap: [sum(sizes_by(m, cap))],
    "a first bucket of 1 MiB": default_first,
    "the wrong order": lambda m, cap: sizes_by(m, cap)[::-1],
}


def test_the_right_bucket_sizes_pass():
    result = check("4.1", sizes_by)
    assert result.passed, result


@pytest.mark.parametrize("diagnosis", MISREAD)
def test_a_misread_rule_of_ddps_buckets_is_named(diagnosis):
    result = check("4.1", MISREAD[diagnosis])
    assert (result.outcome, result.diagnosis) == ("not yet", diagnosis), result
    assert result.tried and result.expected and result.got and result.hint


def forever(model, cap_mb):
    while True:
        pass


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        (lambda m, cap: m, "wrong type"),
        (lambda m, cap: 3, "wrong type"),
        (lambda m, cap: [0] * len(sizes_by(m, cap)), "zeros"),
        (lambda m, cap: torch.randint(1, 10**6, (len(sizes_by(m, cap)),)).tolist(), None),
        (lambda m, cap: [], "wrong length"),
        (lambda m, cap: print("looking"), "nothing returned"),
        (lambda m, cap: m.no_such_thing, "an error"),
        (lambda m, cap: os._exit(3), "left early"),
        (lambda m, cap: os.kill(os.getpid(), 11), "crash"),
        (forever, "endless loop"),
    ],
)
def test_lazy_and_broken_predictions_of_buckets_end_in_a_message(answer, diagnosis):
    began = time.monotonic()
    result = check("4.1", answer)
    assert result.outcome == "not yet" and result.diagnosis == (diagnosis or result.diagnosis), result
    assert result.message and time.monotonic() - began < 20


class ByHand:
    """A right answer to 4.2, and a place for each mistake."""

    frozen_hooked = False
    divide = 1
    whole_world = True
    wait = "finish"
    send = "full"
    copy_back = True
    reset = True
    each_alone = False
    one_bucket = False
    drop_last = False
    only_rank_0 = False

    def __init__(self, model, cap_mb):
        parameters = [p for p in model.parameters() if p.requires_grad or self.frozen_hooked][::-1]
        self.buckets = [[]]
        for parameter in parameters:
            if self.buckets[-1] and (self.each_alone or self._full(cap_mb)) and not self.one_bucket:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent = []
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket:
                parameter.register_post_accumulate_grad_hook(lambda _, i=index: self.arrived(i))

    def _full(self, cap_mb):
        return sum(p.nbytes for p in self.buckets[-1]) >= cap_mb * 2**20

    def arrived(self, index):
        self.missing[index] -= 1
        if self.missing[index] == 0:
            if self.reset:
                self.missing[index] = len(self.buckets[index])
            last = index == len(self.buckets) - 1
            if self.send == "full" and not (self.drop_last and last):
                self.launch(index)

    def launch(self, index):
        bucket = self.buckets[index]
        flat = torch.cat([p.grad.flatten() for p in bucket])
        if self.whole_world:
            flat /= dist.get_world_size() ** self.divide
        work = dist.all_reduce(flat, async_op=True) if not self.only_rank_0 or dist.get_rank() == 0 else None
        if self.wait == "hook":
            work.wait()
        self.sent.append((bucket, flat, work))

    def finish(self):
        if self.send == "end":
            for index in range(len(self.buckets)):
                self.launch(index)
        for bucket, flat, work in self.sent:
            if self.wait == "finish" and work is not None:
                work.wait()
            for p, average in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if self.copy_back:
                    p.grad.copy_(average.view_as(p))
        self.sent.clear()


def by_hand(**changes):
    return type("ByHand", (ByHand,), changes)


MISTAKES = {
    "a sum, not a mean": {"whole_world": False},
    "averaged twice": {"divide": 2},
    "never copied back": {"copy_back": False},
    "did not wait": {"wait": "never"},
    "the last bucket is never sent": {"drop_last": True},
    "only the first step is right": {"reset": False},
    "frozen parameters": {"frozen_hooked": True},
    "one call a parameter": {"each_alone": True},
    "one bucket": {"one_bucket": True},
}


@pytest.mark.timing
def test_bucketing_with_overlap_passes():
    result = check("4.2", ByHand)
    assert result.passed, result


@pytest.mark.parametrize("diagnosis", MISTAKES)
def test_a_known_mistake_in_bucketing_is_named(diagnosis):
    result = check("4.2", by_hand(**MISTAKES[diagnosis]))
    assert (result.outcome, result.diagnosis) == ("not yet", diagnosis), result


@pytest.mark.timing
@pytest.mark.parametrize(
    ("changes", "diagnosis"),
    [({"wait": "hook"}, "waits in the hook"), ({"send": "end"}, "sends after backward")],
)
def test_right_gradients_without_overlap_do_not_pass(changes, diagnosis):
    result = check("4.2", by_hand(**changes))
    assert (result.outcome, result.diagnosis) == ("not yet", diagnosis), result


class Untouched:
    def __init__(self, model, cap_mb):
        raise NotImplementedError("your code here")


class Lazy:
    def __init__(self, model, cap_mb):
        self.model = model

    def finish(self):
        pass


class Zeros(Lazy):
    def finish(self):
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)


class Random(Lazy):
    def finish(self):
        for p in self.model.parameters():
            p.grad = torch.randn_like(p)


class NoGradients(Lazy):
    def finish(self):
        for p in self.model.parameters():
            p.grad = None


class Halves(Lazy):
    def finish(self):
        self.model.half()


class Loops(Lazy):
    def finish(self):
        while True:
            pass


class Alone(Lazy):
    def finish(self):
        if dist.get_rank() == 0:
            dist.barrier()


class NoFinish:
    def __init__(self, model, cap_mb):
        pass


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        (Lazy, "never synchronised"),
        (Zeros, "zeros"),
        (Random, "the ranks differ"),
        (NoGradients, "wrong keys"),
        (Halves, None),
        (Loops, "endless loop"),
        (Alone, "deadlock"),
        (by_hand(only_rank_0=True), None),
        (NoFinish, "an error"),
        (len, "an error"),
        (7, "wrong type"),
    ],
)
def test_lazy_and_broken_bucketing_ends_in_a_message(answer, diagnosis):
    began = time.monotonic()
    result = check("4.2", answer)
    assert result.outcome == "not yet" and result.diagnosis == (diagnosis or result.diagnosis), result
    assert result.message and time.monotonic() - began < 20


@pytest.mark.parametrize(("name", "stub"), [("4.1", None), ("4.2", Untouched), ("4.3", ...), ("4.3", None)])
def test_a_stub_counts_as_not_attempted(name, stub):
    assert check(name, stub).outcome == "not attempted"


def test_a_cap_near_the_best_passes():
    result = check("4.3", best_cap()[0])
    assert result.passed and len(result.checked) == 2, result


@pytest.mark.parametrize(
    ("cap", "diagnosis"),
    [
        (0.1, "latency dominates"),
        (1, "latency dominates"),
        (4, "nothing left to overlap"),
        (25, "nothing left to overlap"),
        (1e9, "nothing left to overlap"),
        (-1, "out of range"),
        ("25", "wrong type"),
        (True, "wrong type"),
        (float("nan"), "wrong type"),
        ([2], "wrong type"),
        (lambda: 2, "wrong type"),
    ],
)
def test_a_cap_that_does_not_fit_the_link_is_told_why(cap, diagnosis):
    result = check("4.3", cap)
    assert (result.outcome, result.diagnosis) == ("not yet", diagnosis), result


@pytest.mark.parametrize("name", ["4.1", "4.2", "4.3"])
def test_the_last_hint_shows_a_picture(name):
    last = [check.hint(name) for _ in range(3)][-1]
    assert last.number == last.of == 3
    assert "<svg" in last._repr_html_() or "data:image/png" in last._repr_html_()
