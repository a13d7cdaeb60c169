"""Data parallel by hand: what `nn.DataParallel` does, on virtual devices, with every copy in the books.

    model = DataParallelByHand(net, devices=4, pace=Pace(gbps=1))
    loss_fn(model(inputs), targets).backward()      # net's parameters now hold the whole batch's gradients
    model.step                                      # the six movements: bytes and milliseconds

Device 0 is the main device: the model and the batch live there, and all copies go over its one full-duplex
link. Copies are real; with a pace they take no less than on such a link. Movements follow one another, where
GPUs may run ahead. As in `nn.DataParallel`, device 0 works on the module itself, and what the other replicas
do to theirs (buffers, attributes) is lost.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from course_lib import dp_ledger
from course_lib.dp_devices import THREAD_NAME, Fleet, Parcel
from course_lib.dp_ledger import Step
from course_lib.dp_replica import apply, free_to_add_to, go_back, replica
from course_lib.pace import Pace

MOST_DEVICES = 8


class DataParallelByHand(nn.Module):
    """`module` on `devices` virtual devices (1 to 8), called with a whole batch like the module itself.

    Every tensor among the arguments, also inside tuples, lists and dicts, is cut along its first dimension,
    as `Tensor.chunk` cuts; anything else goes to every device. Outputs are tensors, alone or nested; a number
    becomes a vector with one element a device. step: the books of the latest pass. bytes_sent and
    bytes_received: of all passes, by device. Raises ValueError for inputs that cannot be cut alike, and
    RuntimeError, naming the device, where the module fails on one.
    """

    def __init__(self, module: nn.Module, devices: int = 2, pace: Pace | None = None) -> None:
        super().__init__()
        if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= MOST_DEVICES:
            raise ValueError(f"devices={devices!r}: give a whole number from 1 to {MOST_DEVICES}")
        self.module = module
        self.fleet = Fleet(devices, pace or Pace())
        self.step: Step | None = None

    @property
    def bytes_sent(self) -> list[int]:
        """What each device sent since this model was made."""
        return list(self.fleet.bytes_sent)

    @property
    def bytes_received(self) -> list[int]:
        """What each device received since this model was made."""
        return list(self.fleet.bytes_received)

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Note what else lies on device 0, such as the optimizer's state."""
        self.fleet.devices[0].memory.hold(kind, tensors)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Scatter, replicate, apply, gather; the backward pass of what it returns does the rest."""
        if threading.current_thread().name.startswith(THREAD_NAME):
            raise RuntimeError("a DataParallelByHand cannot run inside another one: its devices are taken")
        this = _Pass(self, args, kwargs)
        if torch.is_grad_enabled() and any(t.requires_grad for t in [*this.whole, *this.trained]):
            return this.with_outputs(_Crossing.apply(this, *this.whole, *this.trained))
        return this.with_outputs(this.forward(learning=False))


class _Crossing(torch.autograd.Function):
    """Where autograd on device 0 hands over to the devices, and takes their gradients back."""

    @staticmethod
    def forward(ctx: Any, this: _Pass, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.this = this
        ctx.set_materialize_grads(False)
        outputs = this.forward(learning=True)
        ctx.mark_non_differentiable(*(o for o, edge in zip(outputs, this.edges[0], strict=True) if not edge))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.this.backward(gradients)


class _Pass:
    """One forward pass through the devices, and its backward pass. `step` has its books."""

    def __init__(self, model: DataParallelByHand, args: tuple, kwargs: dict) -> None:
        self.module, self.fleet = model.module, model.fleet
        self.leaves, self.shape = pytree.tree_flatten((args, kwargs))
        self.whole = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        devices, rows = self.fleet.devices, _rows_of(self.whole)
        self.parts = dp_ledger.parts_of(rows, len(devices)) if rows else (0,)
        self.main, self.others = devices[0], devices[1 : len(self.parts)]
        kind = "paced" if self.fleet.pace.holds_back else "measured"
        model.step = self.step = Step(len(devices), self.parts, kind)
        self.main.memory.hold("parameters", [*self.module.parameters(), *self.module.buffers()])
        self.main.memory.hold("inputs", self.whole)
        for device in devices:
            device.memory.forget_peak()
        self.inputs: list[list[Tensor]] = []
        self.copies: list[Sequence[Tensor]] = []
        self.edges: list[list[GradientEdge | None]] = []
        self.numbers: list[bool] = []
        self.output_rows: list[list[int]] = []

    def forward(self, learning: bool) -> list[Tensor]:
        """Movements 1 to 4: the output tensors of the whole batch, on device 0."""
        cut = [tensor.detach().split(list(self.parts)) for tensor in self.whole]
        self.inputs = self._scatter(dp_ledger.SCATTER, "inputs", cut)
        for own in self.inputs:
            for part, whole in zip(own, self.whole, strict=True):
                part.requires_grad_(learning and whole.requires_grad)
        replicas = self._replicate()
        forward = functools.partial(apply, learning, torch.is_autocast_enabled("cpu"))
        arguments = [self._arguments(own) for own in self.inputs]
        ran = self.fleet.run(self.step, dp_ledger.APPLY, forward, replicas, arguments)
        del replicas, arguments
        if not learning:
            self.inputs, self.copies = [], []
        return self._gather(ran)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Movements 5 and 6: the gradients of the tensors that came in, then those of the parameters."""
        if not self.copies:
            raise RuntimeError("this pass has gone backward already: go forward again first")
        given = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
        self.main.memory.hold("output gradients", [gradient for _, gradient in given])
        cut = [gradient.split([own[i] for own in self.output_rows]) for i, gradient in given]
        scattered = self._scatter(dp_ledger.SCATTER_GRADIENTS, "output gradients", cut)
        edges = [[own[i] for i, _ in given] for own in self.edges]
        scattered = [
            [part[0] if self.numbers[i] else part for (i, _), part in zip(given, own, strict=True)]
            for own in scattered
        ]
        asked = [index for index, tensor in enumerate(self.whole) if tensor.requires_grad]
        inputs = [[own[index] for index in asked] for own in self.inputs]
        found = self.fleet.run(self.step, dp_ledger.BACKWARD, go_back, edges, scattered, inputs, self.copies)
        self.inputs, self.copies, self.edges = [], [], []
        del edges, scattered, inputs, cut
        of_inputs, sums = self._reduce(found, [gradient for _, gradient in given])
        by_index = dict(zip(asked, of_inputs, strict=True))
        return [*(by_index.get(index) for index in range(len(self.whole))), *sums]

    def with_outputs(self, tensors: Sequence[Tensor]) -> Any:
        """What the module returned, with these tensors for its own."""
        own = iter(tensors)
        leaves = [next(own) if is_tensor else leaf for is_tensor, leaf in self.output_leaves]
        return pytree.tree_unflatten(leaves, self.output_shape)

    def _scatter(self, name: str, kind: str, cut: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Each device's part of each tensor. Device 0 keeps views of the whole; the others get copies."""
        parts = [[pieces[index] for pieces in cut] for index in range(len(self.parts))]
        landed = [[view.detach() for view in parts[0]]]
        parcels = [(self.main, other, part) for other, part in zip(self.others, parts[1:], strict=True)]
        self.fleet.move(self.step, name, kind, parcels, landed.append)
        return landed

    def _replicate(self) -> list[nn.Module]:
        """The module for device 0; for each other a replica, on copies of its parameters and buffers."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        replicas, self.copies = [self.module], [self.trained]

        def build(landed: list[Tensor]) -> None:
            twins = {
                id(t): nn.Parameter(c, t.requires_grad) if isinstance(t, nn.Parameter) else c
                for t, c in zip(tensors, landed, strict=True)
            }
            replicas.append(replica(self.module, twins))
            self.copies.append([twins[id(parameter)] for parameter in self.trained])

        parcels = [(self.main, other, tensors) for other in self.others]
        self.fleet.move(self.step, dp_ledger.REPLICATE, "replica", parcels, build)
        return replicas

    def _arguments(self, own: Sequence[Tensor]) -> tuple[tuple, dict]:
        """The arguments of the module with one device's part of each tensor."""
        tensors = iter(own)
        leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.shape)

    def _gather(self, ran: list[Any]) -> list[Tensor]:
        """The devices' outputs, put together on device 0, where the loss will be."""
        flat = [pytree.tree_flatten(result) for result in ran]
        self.output_shape = flat[0][1]
        if any(shape != self.output_shape for _, shape in flat):
            raise RuntimeError("the replicas returned different structures, which cannot be put together")
        self.output_leaves = [
            (isinstance(t, Tensor), None if isinstance(t, Tensor) else t) for t in flat[0][0]
        ]
        made = [[leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves, _ in flat]
        # Edges of the graph, not tensors: a device's outputs are freed once they have been gathered.
        self.edges = [[get_gradient_edge(t) if t.requires_grad else None for t in own] for own in made]
        self.numbers = [tensor.dim() == 0 for tensor in made[0]]
        outputs = [[torch.atleast_1d(tensor.detach()) for tensor in own] for own in made]
        self.output_rows = [[len(tensor) for tensor in own] for own in outputs]
        ran.clear()
        del flat, made
        landed = outputs[:1]
        parcels = ((other, self.main, outputs.pop(1)) for other in self.others)
        together: list[Tensor] = []

        def put_together() -> None:
            together.extend(torch.cat(parts) for parts in zip(*landed, strict=True))
            self.main.memory.hold("outputs", together)
            landed.clear()
            outputs.clear()

        self.fleet.move(self.step, dp_ledger.GATHER, "outputs", parcels, landed.append, put_together)
        return together

    def _reduce(
        self, found: list[tuple[list[Tensor], list[Tensor | None]]], given: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Add the gradients up on device 0, one device after another; put those of inputs together."""
        of_inputs = [[part] for part in found[0][0]]
        sums = free_to_add_to(found[0][1], given)
        indices: list[int] = []
        del found[0]

        def send() -> Iterator[Parcel]:
            for device in self.others:
                inputs, gradients = found.pop(0)
                indices[:] = [i for i, gradient in enumerate(gradients) if gradient is not None]
                yield device, self.main, [*inputs, *(g for g in gradients if g is not None)]

        def add(landed: list[Tensor]) -> None:
            for parts, part in zip(of_inputs, landed[: len(of_inputs)], strict=True):
                parts.append(part)
            for index, gradient in zip(indices, landed[len(of_inputs) :], strict=True):
                before = sums[index]
                sums[index] = gradient if before is None else before.add_(gradient)

        self.fleet.move(self.step, dp_ledger.REDUCE, "gradients", send(), add)
        return [torch.cat(parts) for parts in of_inputs], sums


def _rows_of(tensors: Sequence[Tensor]) -> int:
    """How many rows the batch has; 0 where there are no tensors. ValueError where they do not agree."""
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("a tensor without dimensions cannot be scattered: pass a number, or give it rows")
    rows = sorted({len(tensor) for tensor in tensors})
    if len(rows) > 1:
        raise ValueError(
            f"the inputs have {' and '.join(map(str, rows))} rows: all tensors are cut along their first "
            "dimension, so that has to be the same for all"
        )
    return rows[0] if rows else 0
