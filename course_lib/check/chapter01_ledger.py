"""Exercise 1.2: the bytes on device 0's link, against those that a real step copied."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from course_lib.check import chapter01_ranks as ranks
from course_lib.check.lab import Lab, NotYet
from course_lib.check.registry import Hint, exercise
from course_lib.dp_ledger import parts_of
from course_lib.launch import launch

LEDGER_CASES = ((16, 4), (13, 4), (5, 4), (2, 8), (7, 1))


def _ledger_picture() -> str:
    """The stepper's picture of replicating."""
    from course_lib.dp import DataParallelByHand
    from course_lib.dp_stepper import picture

    model = DataParallelByHand(nn.Linear(256, 256), 4)
    model(torch.randn(13, 256)).square().mean().backward()
    assert model.step is not None
    return picture(model.step, 2)


@functools.cache
def _counted() -> list[tuple[dict[str, int], dict[str, int]]]:
    return launch(ranks.counted, 1, args=(LEDGER_CASES,), backend="gloo", progress=False).results[0]


@exercise(
    "1.2",
    "The byte ledger of device 0's link",
    hints=(
        Hint(
            "Which rows travel?",
            "Device 0 keeps its own rows. With `each = ceil(rows / devices)`, `rows - each` rows go out as "
            "inputs, come back as outputs, and go out again as gradients of outputs (none where `each` is "
            "all of them).",
            fits=("device 0's own copy", "an even split assumed", "wrong type", "a movement is missing"),
        ),
        Hint(
            "How many copies of the model?",
            "One for each *other* device that has rows: `ceil(rows / each) - 1`. Parameters and buffers go "
            "out, but only parameters have gradients that come back.",
            fits=("buffers forgotten", "buffers have no gradients", "idle devices counted"),
        ),
        Hint("What it should look like", "13 rows on four devices: replicate.", picture=_ledger_picture),
    ),
)
def judge_ledger(lab: Lab, ledger: Callable) -> None:
    """Bytes by movement, against those that a real step of DP on virtual devices copied."""
    for (rows, devices), (sizes, expected) in zip(LEDGER_CASES, _counted(), strict=True):
        outcome = lab.call(
            ranks.call_ledger, (ledger, rows, devices, sizes), 1, tried=ranks.case(rows, devices)
        )
        _judge_ledger(lab, outcome.results[0], rows, devices, sizes, expected)
        lab.note(f"{ranks.case(rows, devices)}: {sum(expected.values()):,} bytes")


def _judge_ledger(
    lab: Lab, got: Any, rows: int, devices: int, sizes: dict[str, int], expected: dict[str, int]
) -> None:
    if not isinstance(got, dict) or any(
        isinstance(size, bool) or not isinstance(size, (int, float)) for size in got.values()
    ):
        raise NotYet(
            "wrong type",
            "The ledger is to be a dict with the bytes of each movement, as numbers.",
            tried=lab.last.tried if lab.last else "",
            got=type(got).__name__,
        )
    missing = [name for name in expected if name not in got]
    lab.require(
        not missing and len(got) == len(expected),
        "a movement is missing" if missing else "an unknown movement",
        f"The ledger is to have these five: {', '.join(map(repr, expected))}.",
        got=", ".join(map(repr, got)),
    )
    if got == expected:
        return
    name = next(name for name in expected if got[name] != expected[name])
    says = _ledger_mistake(got, name, rows, devices, sizes)
    diagnosis, text = says or ("wrong bytes", f"The bytes of {name!r} are not those that were counted.")
    raise NotYet(
        diagnosis,
        text,
        tried=lab.last.tried if lab.last else "",
        expected=f"{name}: {expected[name]:,} bytes",
        got=f"{got[name]:,} bytes",
    )


def _ledger_mistake(
    got: Mapping[str, float], name: str, rows: int, devices: int, sizes: dict[str, int]
) -> tuple[str, str] | None:
    """The known mistake that gives this number for this movement."""
    used, model = len(parts_of(rows, devices)), sizes["parameters"] + sizes["buffers"]
    own = ("device 0's own copy", "Device 0 is counted too: it has the model, and its own rows and gradient.")
    even = (
        "an even split assumed",
        "Rows do not divide evenly here: device 0 keeps `ceil(rows / devices)` of them, and the last device "
        "may have fewer.",
    )
    idle = (
        "idle devices counted",
        f"With {rows} rows, only {used} of {devices} devices have work. The others get no model.",
    )
    known: dict[float, tuple[str, str]]
    if name in ("replicate model", "reduce gradients"):
        unit = model if name == "replicate model" else sizes["parameters"]
        known = {unit * used: own, unit * devices: own, unit * (devices - 1): idle}
        if name == "replicate model":
            says = "The replicas need the buffers too, such as BatchNorm's statistics."
            known.update(
                {n * sizes["parameters"]: ("buffers forgotten", says) for n in (used - 1, devices - 1)}
            )
        else:
            says = "Buffers are sent out, but have no gradients that could come back."
            known.update({n * model: ("buffers have no gradients", says) for n in (used - 1, devices - 1)})
    else:
        unit = sizes["input_row"] if name == "scatter inputs" else sizes["output_row"]
        each = -(-rows // devices)
        splits = (rows * (devices - 1) / devices, rows // devices * (devices - 1), each * (devices - 1))
        known = {unit * split: even for split in (*splits, rows - rows / devices, rows - rows // devices)}
        known[unit * rows] = own
        says = "Gradients of outputs go out again, to the devices that computed them, before backward."
        if name == "scatter output gradients":
            known[0] = ("output gradients forgotten", says)
    return known.get(got[name])
