"""Layers that take the time they are told to, with real parameters and real gradients.

A paced layer waits, so that eight ranks on two cores behave like eight devices: nothing that the machine does
for it counts, neither its own arithmetic nor queueing for a core (see `clock`). It takes `forward_ms` in the
forward pass, and `backward_ms` in the backward pass before its gradients are ready; then DDP may send them.
"""

from __future__ import annotations

import math
import threading
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from course_lib import clock

Module = TypeVar("Module", bound=nn.Module)
MOST_MS = 60_000.0
_begun = threading.local()


def paced(module: Module, forward_ms: float, backward_ms: float) -> Module:
    """Make `module` take these milliseconds, each 0 to 60,000, and return it.

    It is the same module, with hooks: its parameters keep their names. Its output is to be tensors, alone or
    in tuples, lists or dicts. A module that is paced already gets the new times. Raises TypeError and
    ValueError for times that make no sense.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"paced() takes a module such as nn.Linear(512, 512), got {type(module).__name__}")
    forward_seconds = _seconds("forward_ms", forward_ms)
    backward_seconds = _seconds("backward_ms", backward_ms)
    known = next((h for h in module._forward_hooks.values() if isinstance(h, _PaceAfter)), None)
    if known is not None:
        known.forward_seconds, known.backward_seconds = forward_seconds, backward_seconds
        return module
    module.register_forward_pre_hook(_begin)
    module.register_forward_hook(_PaceAfter(forward_seconds, backward_seconds))
    return module


def paced_mlp(
    layers: int = 8, width: int = 512, forward_ms: float = 10.0, backward_ms: float = 20.0
) -> nn.Sequential:
    """`layers` linear layers of `width` to `width` without bias, each of which takes these milliseconds.

    Its parameters are `layers * width * width * 4` bytes: 8,388,608 as it is.
    """
    for name, value in (("layers", layers), ("width", width)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: pass a whole number from 1 on")
    made = (nn.Linear(width, width, bias=False) for _ in range(layers))
    return nn.Sequential(*(paced(layer, forward_ms, backward_ms) for layer in made))


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is not a number of milliseconds")
    if not (math.isfinite(value) and 0 <= value <= MOST_MS):
        raise ValueError(f"{name}={value!r}: pass milliseconds, from 0 to {MOST_MS:,.0f}")
    return value * 1e-3


def _begin(module: nn.Module, _: Any) -> None:
    thread = clock.current()
    thread.absorb()
    thread.pay()
    _stack().append((id(module), thread.now()))


def _stack() -> list[tuple[int, float]]:
    """Which paced modules this thread is in, and when it came there. The times are the thread's own."""
    if not hasattr(_begun, "stack"):
        _begun.stack = []
    return _begun.stack


class _PaceAfter:
    """The forward hook: waits out the forward pass, and hangs the backward's wait on the output."""

    def __init__(self, forward_seconds: float, backward_seconds: float) -> None:
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds

    def __call__(self, module: nn.Module, _: Any, output: Any) -> Any:
        begun = None
        # A forward pass that raised has left its entry behind.
        while begun is None:
            owner, when = _stack().pop()
            begun = when if owner == id(module) else None
        clock.current().sleep_until(begun + self.forward_seconds)
        leaves, shape = pytree.tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if not tensors:
            return output
        waiting = iter(_WaitInBackward.apply(self.backward_seconds, *tensors))
        with_wait = [
            next(waiting) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf
            for leaf in leaves
        ]
        return pytree.tree_unflatten(with_wait, shape)


class _WaitInBackward(torch.autograd.Function):
    """Passes tensors through; in the backward pass, waits before it passes their gradients on.

    So the wait is over before the module's own backward makes its weights' gradients, and DDP's hooks run.
    """

    @staticmethod
    def forward(ctx: Any, seconds: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.seconds = seconds
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        thread = clock.current()
        thread.absorb()
        thread.sleep_until(thread.now() + ctx.seconds)
        return None, *gradients
