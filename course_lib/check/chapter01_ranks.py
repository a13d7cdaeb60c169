"""What the exercises of chapter 01 run in the rank, and what they compare it with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

COUNTED = (
    "scatter inputs",
    "replicate model",
    "gather outputs",
    "scatter output gradients",
    "reduce gradients",
)


def case(rows: int, devices: int) -> str:
    """Such as "13 rows on 4 devices"."""
    words = (f"{count} {name}" if count == 1 else f"{count} {name}s" for count, name in
             ((rows, "row"), (devices, "device")))  # fmt: skip
    return " on ".join(words)


def batch_of(rows: int) -> dict[str, Tensor]:
    """Images and labels, all different."""
    return {
        "images": torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=torch.float64),
        "labels": torch.arange(rows) * 7 + 1,
    }


def outputs_of(batch: dict[str, Tensor]) -> Tensor:
    """What the devices compute of their rows in exercise 1.1."""
    return batch["images"] * 2 + batch["labels"].unsqueeze(1)


def scatter_and_gather(answer: tuple[Callable, Callable], batch: dict[str, Tensor], devices: int) -> Any:
    """In the rank: scatter, compute on each part, gather."""
    scatter, gather = answer
    parts = scatter(batch, devices)
    try:
        outputs = [outputs_of(part) for part in parts]
    except (AttributeError, TypeError, KeyError, IndexError, RuntimeError):
        outputs = []
    if not outputs:  # the judge says what is wrong with the parts
        return {"parts": parts, "gathered": None}
    return {"parts": parts, "gathered": gather(outputs)}


def call_ledger(ledger: Callable, rows: int, devices: int, sizes: dict[str, int]) -> Any:
    """In the rank: the learner's ledger."""
    return ledger(rows, devices, **sizes)


def counted(cases: tuple[tuple[int, int], ...]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """In a rank, for each case: the sizes of a model and a row, and what each movement of a step copied."""
    return [_counted(rows, devices) for rows, devices in cases]


def _counted(rows: int, devices: int) -> tuple[dict[str, int], dict[str, int]]:
    from course_lib.dp import DataParallelByHand

    net = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)).eval()
    inputs = torch.randn(rows, 6)
    model = DataParallelByHand(net, devices)
    outputs = model(inputs)
    outputs.square().mean().backward()
    sizes = {
        "parameters": sum(p.nbytes for p in net.parameters()),
        "buffers": sum(b.nbytes for b in net.buffers()),
        "input_row": inputs[0].nbytes,
        "output_row": outputs[0].nbytes,
    }
    assert model.step is not None
    books = model.step.bytes_by_movement()
    return sizes, {name: books[name] for name in COUNTED}


def small_digits(rows: int) -> tuple[Tensor, Tensor]:
    """A few digits, in float64."""
    from course_lib.tasks import digits

    images, labels = digits("train")
    return images[:rows].double(), labels[:rows]


def small_net() -> nn.Sequential:
    """The model of exercise 1.3."""
    from course_lib.tasks import mlp

    return mlp(16, seed=3).double()


def one_step(step: Callable, images: Tensor, labels: Tensor, devices: int) -> dict[str, Any]:
    """In the rank: the learner's step. Notes how many rows each forward pass saw, on whatever copy."""
    model, seen = small_net(), []
    before = copy.deepcopy(model.state_dict())
    # Copies of the model share this hook and the list.
    model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    step(model, images, labels, devices)
    after = model.state_dict()
    return {
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "rows": list(seen),
        "model": all(torch.equal(after[name], value) for name, value in before.items()),
    }


def gradients(model: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """The gradients of a loss by name, of a copy of the model."""
    alone = copy.deepcopy(model)
    loss_of(alone).backward()
    return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


def share(model: nn.Module, images: Tensor, labels: Tensor, devices: int, device: int) -> dict[str, Tensor]:
    """One device's share of the gradient of the whole batch's mean loss."""
    part, target = images.chunk(devices)[device], labels.chunk(devices)[device]
    return gradients(model, lambda m: cross_entropy(m(part), target, reduction="sum") / len(images))
