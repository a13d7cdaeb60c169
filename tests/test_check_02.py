"""The exercises of chapter 02: solutions pass, and each known mistake is called by its name."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib import launch
from course_lib.check import check

# Answers travel by value, as they do from a notebook: a rank does not import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SOLUTIONS = Path(__file__).parents[1] / "solutions" / "02_process_groups.ipynb"


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch, request):
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))
    if "hint" not in request.node.name:
        request.getfixturevalue("nothing_left")


def in_group(work, seconds):
    dist.init_process_group(timeout=timedelta(seconds=seconds))
    try:
        return work()
    finally:
        dist.destroy_process_group()


def no_finally(work, seconds):
    dist.init_process_group(timeout=timedelta(seconds=seconds))
    value = work()
    dist.destroy_process_group()
    return value


def no_clean_up(work, seconds):
    dist.init_process_group(timeout=timedelta(seconds=seconds))
    return work()


def rank_0_cleans_up(work, seconds):
    dist.init_process_group(timeout=timedelta(seconds=seconds))
    try:
        return work()
    finally:
        if dist.get_rank() == 0:
            dist.destroy_process_group()


def swallows(work, seconds):
    dist.init_process_group(timeout=timedelta(seconds=seconds))
    try:
        return work()
    except Exception as error:
        print(error)
    finally:
        dist.destroy_process_group()


def half_an_hour(work, seconds):
    dist.init_process_group()
    try:
        return work()
    finally:
        dist.destroy_process_group()


def no_result(work, seconds):
    dist.init_process_group(timeout=timedelta(seconds=seconds))
    try:
        work()
    finally:
        dist.destroy_process_group()


def no_group(work, seconds):
    return work()


def twice(work, seconds):
    dist.init_process_group(timeout=timedelta(seconds=seconds))
    try:
        work()
        return work()
    finally:
        dist.destroy_process_group()


def no_work(work, seconds):
    dist.init_process_group(timeout=timedelta(seconds=seconds))
    dist.destroy_process_group()
    return 6.0


def alone(work, seconds):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(),
                            timeout=timedelta(seconds=seconds))  # fmt: skip
    try:
        return work()
    finally:
        dist.destroy_process_group()


def only_rank_0_joins(work, seconds):
    if os.environ["RANK"] == "0":
        return in_group(work, seconds)
    return work()


def own_address(work, seconds):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    dist.init_process_group(timeout=timedelta(seconds=seconds))
    try:
        return work()
    finally:
        dist.destroy_process_group()


def forever(*arguments):
    while True:
        pass


def crash(*arguments):
    os.abort()


def leaves(*arguments):
    sys.exit(0)


def raising(*arguments):
    raise KeyError("rows")


def stub(*arguments):
    raise NotImplementedError("your code here")


def refuse(name, wrong, diagnosis, seconds=45):
    """The check names this mistake, in time, with a hint and a sentence."""
    began = time.monotonic()
    result = check(name, wrong)
    assert (result.outcome, result.diagnosis) == ("not yet", diagnosis), result
    assert result.message and result.hint is not None
    assert time.monotonic() - began < seconds
    return result


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        (no_finally, "not cleaned up after an error"),
        (no_clean_up, "not cleaned up"),
        (rank_0_cleans_up, "only rank 0 cleans up"),
        (swallows, "the error is swallowed"),
        (half_an_hour, "another time limit"),
        (no_result, "the result is lost"),
        (no_group, "no process group"),
        (twice, "the work is done twice"),
        (no_work, "the work is not done"),
        (alone, "another world"),
        (lambda work, seconds: in_group(work, seconds) + 1, "another result"),
        (lambda work, seconds: torch.tensor(in_group(work, seconds)), "another result"),
        (only_rank_0_joins, "deadlock"),
        (own_address, "the environment changed"),
        (forever, "endless loop"),
        (crash, "crash"),
        (leaves, "left early"),
        (raising, "an error"),
        (3, "wrong type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_set_up_or_clean_up_is_told_why(answer, diagnosis):
    refuse("2.1", answer, diagnosis)


def synchronise(model):
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)


def parameters_only(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


def trainable_only(model):
    for tensor in [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]:
        dist.broadcast(tensor.data, src=0)


def buffers_only(model):
    for tensor in model.buffers():
        dist.broadcast(tensor, src=0)


def averaged(model):
    for tensor in model.parameters():
        dist.all_reduce(tensor.data)
        tensor.data /= dist.get_world_size()


def last_root(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=dist.get_world_size() - 1)


def each_its_own_root(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=dist.get_rank())


def rank_0_alone(model):
    if dist.get_rank() == 0:
        dist.barrier()
        synchronise(model)


def by_state_dict(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def by_objects(model):
    box = [model.state_dict()]
    dist.broadcast_object_list(box, src=0)
    model.load_state_dict(box[0])


def a_copy(model):
    synchronise(copy.deepcopy(model))


def new_parameters(model):
    synchronise(model)
    model.norm.weight = nn.Parameter(model.norm.weight.detach().clone())


def thaws(model):
    synchronise(model)
    model.first.bias.requires_grad_(True)


def zeroed(model):
    for tensor in model.state_dict().values():
        tensor.zero_()


def random_weights(model):
    for tensor in model.parameters():
        nn.init.normal_(tensor)
    synchronise(model)


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        (parameters_only, "buffers forgotten"),
        (trainable_only, "frozen parameters forgotten"),
        (buffers_only, "parameters forgotten"),
        (averaged, "averaged"),
        (last_root, "another root"),
        (by_state_dict, "sent twice"),
        (by_objects, "sent twice"),
        (a_copy, "never synchronised"),
        (lambda model: model, "never synchronised"),
        (lambda model: None if model else 0, "never synchronised"),
        (new_parameters, "new parameters"),
        (thaws, "new parameters"),
        (rank_0_alone, "deadlock"),
        (forever, "endless loop"),
        (crash, "crash"),
        (leaves, "left early"),
        (raising, "an error"),
        (3, "wrong type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_start_is_told_why(answer, diagnosis):
    refuse("2.2", answer, diagnosis)


@pytest.mark.parametrize("answer", [zeroed, random_weights, each_its_own_root])
def test_a_lazy_start_never_passes(answer):
    result = check("2.2", answer)
    assert result.outcome == "not yet" and result.message


class NaiveDDP(nn.Module):
    """The right answer, in parts that can be got wrong."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.begin()

    def begin(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, src=0)

    def forward(self, *inputs):
        return self.module(*inputs)

    def average_gradients(self):
        for gradient in self.gradients():
            dist.all_reduce(gradient)
            gradient /= self.divisor()

    def gradients(self):
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def divisor(self):
        return dist.get_world_size()


class Flat(NaiveDDP):
    def average_gradients(self):
        flat = torch.cat([gradient.flatten() for gradient in self.gradients()]) / self.divisor()
        dist.all_reduce(flat)
        for gradient, mean in zip(
            self.gradients(), flat.split([g.numel() for g in self.gradients()]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))


class Hooks(NaiveDDP):
    def __init__(self, module):
        super().__init__(module)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= self.divisor()

    def average_gradients(self):
        pass


class Sum(NaiveDDP):
    def divisor(self):
        return 1


class Half(NaiveDDP):
    def divisor(self):
        return 2


class DividedTwice(NaiveDDP):
    def divisor(self):
        return dist.get_world_size() ** 2


class NoBroadcast(NaiveDDP):
    def begin(self):
        pass


class NoAverage(NaiveDDP):
    def average_gradients(self):
        pass


class Nothing(NoBroadcast, NoAverage):
    pass


class LastRoot(NaiveDDP):
    def begin(self):
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, src=dist.get_world_size() - 1)


class NoFrozen(NaiveDDP):
    def gradients(self):
        return [p.grad for p in self.module.parameters()]


class Lost(NaiveDDP):
    def average_gradients(self):
        for parameter in self.module.parameters():
            parameter.grad = None


class Zeros(NaiveDDP):
    def average_gradients(self):
        for gradient in self.gradients():
            gradient.zero_()


class Copy(NaiveDDP):
    def __init__(self, module):
        super().__init__(module)
        self.module = copy.deepcopy(module)


class Tied(NaiveDDP):
    def gradients(self):
        named = self.module.named_parameters(remove_duplicate=False)
        return [p.grad for _, p in named if p.grad is not None]


class RankZero(NaiveDDP):
    def average_gradients(self):
        if dist.get_rank() == 0:
            super().average_gradients()


class Random(NaiveDDP):
    def average_gradients(self):
        for gradient in self.gradients():
            gradient.normal_()


class Endless(NaiveDDP):
    def average_gradients(self):
        forever()


class Crash(NaiveDDP):
    def average_gradients(self):
        crash()


class StubStart(NaiveDDP):
    def begin(self):
        raise NotImplementedError("your code here")


class StubAverage(NaiveDDP):
    def average_gradients(self):
        raise NotImplementedError("your code here")


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        (Sum, "a sum, not a mean"),
        (Half, "two ranks assumed"),
        (DividedTwice, "divided twice"),
        (NoBroadcast, "no broadcast at the start"),
        (NoAverage, "never synchronised"),
        (Nothing, "never synchronised"),
        (LastRoot, "another start"),
        (NoFrozen, "frozen parameters have no gradient"),
        (Lost, "no gradient arrives"),
        (Zeros, "no gradient arrives"),
        (Copy, "no gradient arrives"),
        (Tied, "sent twice"),
        (RankZero, "deadlock"),
        (Endless, "endless loop"),
        (Crash, "crash"),
        (nn.Identity, "an error"),
        (lambda module: module, "an error"),
        (DistributedDataParallel, "an error"),
        (3, "wrong type"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_ddp_is_told_why(answer, diagnosis):
    refuse("2.3", answer, diagnosis)


def test_random_gradients_never_pass():
    assert check("2.3", Random).outcome == "not yet"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("2.1", in_group),
        ("2.2", synchronise),
        ("2.3", NaiveDDP),
        ("2.3", Flat),
        ("2.3", Hooks),
    ],
)
def test_right_answers_pass_however_they_are_written(name, answer):
    assert check(name, answer).outcome == "passed"


@pytest.mark.parametrize(
    ("name", "answer"),
    [("2.1", stub), ("2.2", stub), ("2.3", StubStart), ("2.3", StubAverage), ("2.3", None)],
)
def test_a_stub_is_not_attempted(name, answer):
    assert check(name, answer).outcome == "not attempted"


def test_the_solutions_pass():
    names: dict = {}
    for cell in json.loads(SOLUTIONS.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "check.report" not in source:
            exec(source, names)


@pytest.mark.parametrize("name", ["2.1", "2.2", "2.3"])
def test_each_exercise_has_three_hints_and_the_last_has_a_picture(name):
    hints = [check.hint(name, number) for number in (1, 2, 3)]
    assert len({hint.hint.title for hint in hints}) == 3
    assert "<svg" in hints[-1]._repr_html_()


def test_in_a_job_of_its_own_the_group_is_really_gone():
    def work():
        in_group(lambda: 1, 5)
        return dist.is_initialized()

    assert launch(work, 2, backend=None, progress=False).results == [False, False]
