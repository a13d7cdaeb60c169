"""The exercises of chapter 01: solutions pass, and each known mistake is called by its name."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
import time
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch.nn.functional import cross_entropy

from course_lib.check import check

# Answers travel by value, as they do from a notebook: a rank does not import this file and pytest.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SOLUTIONS = Path(__file__).parents[1] / "solutions" / "01_data_parallel.ipynb"


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch, request):
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))
    if "hint" not in request.node.name:  # matplotlib keeps its fonts open
        request.getfixturevalue("nothing_left")


def split(batch, sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        {name: t[start : start + size] for name, t in batch.items()}
        for start, size in zip(starts, sizes, strict=True)
    ]


def right_scatter(batch, devices):
    return split(batch, [len(part) for part in batch["images"].chunk(devices)])


def drops(batch, devices):
    return split(batch, [len(batch["images"]) // devices] * devices)


def rest_to_the_last(batch, devices):
    each, rest = divmod(len(batch["images"]), devices)
    return split(batch, [*[each] * (devices - 1), each + rest])


def balanced(batch, devices):
    return split(batch, [len(part) for part in batch["images"].tensor_split(devices)])


def balanced_without_empty(batch, devices):
    return split(batch, [len(part) for part in batch["images"].tensor_split(devices) if len(part)])


def with_empty(batch, devices):
    parts = [len(part) for part in batch["images"].chunk(devices)]
    return split(batch, parts + [0] * (devices - len(parts)))


def interleaved(batch, devices):
    return [
        {name: t[d::devices] for name, t in batch.items()} for d in range(min(devices, len(batch["images"])))
    ]


def padded(batch, devices):
    each = math.ceil(len(batch["images"]) / devices)
    index = torch.arange(each * devices) % len(batch["images"])
    return [{n: t[index[d * each : (d + 1) * each]] for n, t in batch.items()} for d in range(devices)]


def everyone(batch, devices):
    return [dict(batch) for _ in range(devices)]


def images_only(batch, devices):
    labels = batch["labels"]
    parts = right_scatter(batch, devices)
    return [{"images": part["images"], "labels": labels} for part in parts]


def in_place(batch, devices):
    batch["images"].zero_()
    return right_scatter(batch, devices)


def changing(change):
    """Parts of the right size, with other values in them."""

    def scatter(batch, devices):
        return [{n: change(t) for n, t in part.items()} for part in right_scatter(batch, devices)]

    return scatter


def forever(*arguments, **more):
    while True:
        pass


def crash(*arguments, **more):
    os.abort()


def raising(*arguments, **more):
    raise KeyError("rows")


def locked(*arguments, **more):
    import threading

    lock = threading.Lock()
    with lock, lock:
        pass


def refuse(name, wrong, diagnosis, seconds=30):
    """The check names this mistake, in time, with a hint and a sentence."""
    began = time.monotonic()
    result = check(name, *wrong)
    assert (result.outcome, result.diagnosis) == ("not yet", diagnosis), result
    assert result.message and result.hint is not None
    assert time.monotonic() - began < seconds
    return result


@pytest.mark.parametrize(
    ("scatter", "diagnosis"),
    [
        (drops, "drops rows"),
        (rest_to_the_last, "the last part is too large"),
        (balanced, "another cut"),
        (balanced_without_empty, "another cut"),
        (with_empty, "empty parts"),
        (interleaved, "interleaved"),
        (padded, "repeats rows"),
        (everyone, "the whole batch for everyone"),
        (images_only, "cut differently"),
        (in_place, "edits its input"),
        (lambda batch, devices: batch, "wrong type"),
        (lambda batch, devices: [batch], "the last part is too large"),
        (lambda batch, devices: list(batch["images"].chunk(devices)), "wrong type"),
        (lambda batch, devices: 3, "wrong type"),
        (lambda batch, devices: [], "drops rows"),
        (changing(torch.zeros_like), "zeros"),
        (changing(torch.Tensor.float), "wrong dtype"),
        (changing(lambda t: torch.rand(t.shape).to(t.dtype)), "wrong values"),
        (forever, "endless loop"),
        (crash, "crash"),
        (raising, "an error"),
        (locked, "endless loop"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_scatter_is_told_why(scatter, diagnosis):
    refuse("1.1", (scatter, torch.cat), diagnosis)


@pytest.mark.parametrize(
    ("gather", "diagnosis"),
    [
        (lambda outputs: torch.stack([o[:1] for o in outputs]), "stacked"),
        (lambda outputs: outputs, "wrong type"),
        (lambda outputs: outputs[0], "wrong shape"),
        (lambda outputs: torch.cat(outputs[::-1]), "the wrong order"),
        (lambda outputs: torch.zeros_like(torch.cat(outputs)), "zeros"),
        (lambda outputs: torch.cat(outputs).float(), "wrong dtype"),
        (lambda outputs: torch.cat(outputs) / len(outputs), "off by a factor"),
        (lambda outputs: torch.stack(outputs), "an error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_gather_is_told_why(gather, diagnosis):
    refuse("1.1", (right_scatter, gather), diagnosis)


def books(rows, devices, parameters, buffers, input_row, output_row, **wrong):
    """The right ledger, with whatever can be got wrong about it."""
    each = math.ceil(rows / devices)
    used = math.ceil(rows / each)
    others = {"others": used - 1, "all used": used, "all": devices, "all but one": devices - 1}[
        wrong.get("count", "others")
    ]
    away = wrong.get("away", lambda r, n: r - math.ceil(r / n))(rows, devices)
    return {
        "scatter inputs": away * input_row,
        "replicate model": others * (parameters + wrong.get("sent", 1) * buffers),
        "gather outputs": away * output_row,
        "scatter output gradients": wrong.get("back", 1) * away * output_row,
        "reduce gradients": others * (parameters + wrong.get("reduced", 0) * buffers),
    }


@pytest.mark.parametrize(
    ("wrong", "diagnosis"),
    [
        ({"count": "all used"}, "device 0's own copy"),
        ({"count": "all"}, "device 0's own copy"),
        ({"count": "all but one"}, "idle devices counted"),
        ({"away": lambda r, n: r}, "device 0's own copy"),
        ({"away": lambda r, n: r * (n - 1) / n}, "an even split assumed"),
        ({"away": lambda r, n: r // n * (n - 1)}, "an even split assumed"),
        ({"away": lambda r, n: math.ceil(r / n) * (n - 1)}, "an even split assumed"),
        ({"sent": 0}, "buffers forgotten"),
        ({"reduced": 1}, "buffers have no gradients"),
        ({"back": 0}, "output gradients forgotten"),
    ],
    ids=str,
)
def test_a_known_mistake_in_the_ledger_is_named(wrong, diagnosis):
    def ledger(rows, devices, parameters, buffers, input_row, output_row):
        return books(rows, devices, parameters, buffers, input_row, output_row, **wrong)

    refuse("1.2", (ledger,), diagnosis)


@pytest.mark.parametrize(
    ("ledger", "diagnosis"),
    [
        (lambda rows, devices, **sizes: {}, "a movement is missing"),
        (lambda rows, devices, **sizes: rows, "wrong type"),
        (lambda rows, devices, **sizes: sizes, "a movement is missing"),
        (lambda rows, devices, **sizes: {"scatter inputs": 1}, "a movement is missing"),
        (lambda rows, devices, **s: {**books(rows, devices, **s), "loss": 0}, "an unknown movement"),
        (lambda rows, devices, **s: dict.fromkeys(books(rows, devices, **s), 0), "wrong bytes"),
        (lambda rows, devices, **s: dict.fromkeys(books(rows, devices, **s), True), "wrong type"),
        (lambda rows, devices, **s: {n: str(b) for n, b in books(rows, devices, **s).items()}, "wrong type"),
        (lambda rows, devices, **s: list(books(rows, devices, **s).values()), "wrong type"),
        (forever, "endless loop"),
        (crash, "crash"),
        (raising, "an error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lazy_or_broken_ledger_ends_in_a_message(ledger, diagnosis):
    refuse("1.2", (ledger,), diagnosis)


def step(model, images, labels, devices, *, combine="sum", loss="whole"):
    """The right step, with whatever can be got wrong about it."""
    parts, targets = images.chunk(devices), labels.chunk(devices)
    replicas = [copy.deepcopy(model) for _ in parts]
    outputs = [replica(part) for replica, part in zip(replicas, parts, strict=True)]
    if loss == "whole":
        cross_entropy(torch.cat(outputs), labels).backward()
    else:
        for output, target in zip(outputs, targets, strict=True):
            cross_entropy(output, target).backward()
    for parameter, *own in zip(model.parameters(), *(r.parameters() for r in replicas), strict=True):
        shares = [other.grad for other in own]
        n = len(shares)
        parameter.grad = {
            "sum": lambda s=shares: sum(s),
            "last": lambda s=shares: s[-1],
            "first": lambda s=shares: s[0],
            "mean": lambda s=shares, n=n: sum(s) / n,
            "twice": lambda s=shares: sum(s) + s[0],
            "others": lambda s=shares: sum(s[1:]) if len(s) > 1 else s[0],
            "times": lambda s=shares, n=n: sum(s) * n,
            "zeros": lambda s=shares: torch.zeros_like(s[0]),
            "random": lambda s=shares: torch.randn_like(s[0]),
            "float": lambda s=shares: sum(s),
            "nothing": lambda: None,
        }[combine]()


def whole_batch(model, images, labels, devices):
    cross_entropy(model(images), labels).backward()


def twice_the_work(model, images, labels, devices):
    step(model, images, labels, devices)
    with torch.no_grad():
        model(images)


def also_trains(model, images, labels, devices):
    step(model, images, labels, devices)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def edits_images(model, images, labels, devices):
    step(model, images, labels, devices)
    images.mul_(2)


def of_broken_step(**wrong):
    def mended_step(model, images, labels, devices):
        step(model, images, labels, devices, **wrong)

    return mended_step


@pytest.mark.parametrize(
    ("mended_step", "diagnosis"),
    [
        (of_broken_step(combine="last"), "the last device's gradient"),
        (of_broken_step(combine="first"), "device 0's gradient"),
        (of_broken_step(combine="mean"), "divided by the devices"),
        (of_broken_step(combine="twice"), "added twice"),
        (of_broken_step(combine="others"), "device 0's share is missing"),
        (of_broken_step(combine="times"), "multiplied by the devices"),
        (of_broken_step(combine="mean", loss="parts"), "means of means"),
        (of_broken_step(combine="zeros"), "zeros"),
        (of_broken_step(combine="random"), "wrong values"),
        (of_broken_step(combine="nothing"), "no gradient"),
        (lambda model, images, labels, devices: 0.5, "no gradient"),
        (whole_batch, "not data parallel"),
        (twice_the_work, "not data parallel"),
        (also_trains, "the weights changed"),
        (edits_images, "edits its input"),
        (forever, "endless loop"),
        (crash, "crash"),
        (raising, "an error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_reduction_is_told_why(mended_step, diagnosis):
    refuse("1.3", (mended_step,), diagnosis)


def stub(*arguments, **more):
    raise NotImplementedError("your code here")


@pytest.mark.parametrize(("name", "answers"), [("1.1", 2), ("1.2", 1), ("1.3", 1)])
def test_a_stub_counts_as_not_attempted(name, answers):
    assert check(name, *[stub] * answers).outcome == "not attempted"
    assert check(name, *[None] * answers).outcome == "not attempted"


def test_half_an_answer_counts_as_not_attempted():
    assert check("1.1", right_scatter, stub).outcome == "not attempted"


@pytest.mark.parametrize("name", ["1.1", "1.2", "1.3"])
def test_there_are_three_hints_and_the_last_shows_a_picture(name):
    hints = [check.hint(name, number) for number in (1, 2, 3)]
    assert len({hint.title for hint in (shown.hint for shown in hints)}) == 3
    assert "svg" in hints[-1]._repr_html_()


def test_the_solutions_pass():
    space: dict = {}
    for cell in json.loads(SOLUTIONS.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "report()" not in source:
            exec(compile(source, "solution", "exec"), space)  # each check in it is strict
    assert {"scatter", "gather", "ledger", "mended_step"} <= set(space)


def test_the_broken_step_of_the_notebook_is_recognised():
    source = next(
        "".join(cell["source"])
        for cell in json.loads(SOLUTIONS.read_text())["cells"]
        if "def broken_step" in "".join(cell["source"])
    )
    space: dict = {"copy": copy, "torch": torch, "cross_entropy": cross_entropy, "nn": torch.nn}
    exec(compile("from torch import Tensor, nn\n" + source, "given", "exec"), space)
    refuse("1.3", (space["broken_step"],), "the last device's gradient")
