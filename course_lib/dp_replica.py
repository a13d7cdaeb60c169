"""What happens on one device of data parallel: its replica, its share of the forward and backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from course_lib.dp_devices import VirtualDevice


def replica(module: nn.Module, twins: dict[int, Tensor]) -> nn.Module:
    """The same modules once more, on these copies of its tensors; everything else is shared."""
    # What nn.DataParallel calls too. Modules that cache their weights (LSTM) answer it in their own way.
    made = {each: each._replicate_for_data_parallel() for each in module.modules()}
    for each, twin in made.items():
        for name, child in each._modules.items():
            twin._modules[name] = None if child is None else made[child]
        for name, parameter in each._parameters.items():
            setattr(twin, name, None if parameter is None else twins[id(parameter)])
        for name, buffer in each._buffers.items():
            twin._buffers[name] = None if buffer is None else twins[id(buffer)]
    return made[module]


def apply(learning: bool, autocast: bool, device: VirtualDevice, module: nn.Module, arguments: Any) -> Any:
    """On a device's thread: the forward pass. Autograd's state belongs to a thread, and is handed over."""
    args, kwargs = arguments
    memory = device.memory

    def note(tensor: Tensor) -> Tensor:
        memory.hold("activations", [tensor])
        return tensor

    with torch.set_grad_enabled(learning), torch.autocast("cpu", enabled=autocast):
        with saved_tensors_hooks(note, lambda tensor: tensor):
            output = module(*args, **kwargs)
    memory.hold("outputs", [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)])
    return output


def go_back(
    device: VirtualDevice,
    edges: Sequence[Any],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """On a device's thread: the backward pass. The gradients of its inputs, and of its parameters."""
    pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if e is not None]
    found: Sequence[Tensor | None] = [None] * (len(inputs) + len(parameters))
    if pairs and found:
        starts, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(starts, [*inputs, *parameters], given, allow_unused=True)
    device.memory.hold("gradients", [gradient for gradient in found if gradient is not None])
    of_inputs = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=False)]
    return of_inputs, list(found[len(inputs) :])


def free_to_add_to(gradients: Iterable[Tensor | None], given: Iterable[Tensor]) -> list[Tensor | None]:
    """Device 0's gradients, copied where adding to one would change something else as well."""
    used = {tensor.untyped_storage().data_ptr() for tensor in given}
    free: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is not None:
            place = gradient.untyped_storage().data_ptr()
            if place in used or not gradient.is_contiguous():
                gradient = gradient.clone(memory_format=torch.contiguous_format)
            used.add(gradient.untyped_storage().data_ptr())
        free.append(gradient)
    return free
