"""Watch a training loop from inside: when forward, backward, each bucket and the optimizer ran.

    probe(model)                  # once, after wrapping the model
    with span("evaluate"): ...    # whatever else you want to see

The spans go to the launcher by themselves and come back in `run.spans`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from course_lib import spans
from course_lib.spans import COMPUTE, INPUT, LINK, Span

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def span(name: str, bytes: int | None = None, lane: str = COMPUTE) -> Iterator[None]:
    """Record the time that the body takes as a span called `name`.

    bytes: how much it sends, if it does. lane: the timeline's row: "compute", "link" or "input".
    """
    start = spans.now()
    try:
        yield
    finally:
        _record(name, start, spans.now(), bytes, lane)


def probe(model: torch.nn.Module) -> torch.nn.Module:
    """Record each training step of `model`; returns it unchanged.

    Spans: "input" (waiting for a DataLoader), "forward", "backward" (until the last gradient is computed),
    "all_reduce" for each of DDP's buckets (from its launch to its completion, with its bytes), "wait" (what
    is left of the communication once backward has computed everything) and "optimizer". A step begins with
    each forward in training mode. Works for plain modules too; those have no buckets.

    DDP takes one communication hook, and the probe needs it: register your own as usual, after `probe`,
    and the probe runs it inside its own. Raises RuntimeError where one was registered before.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"probe needs a torch.nn.Module, and was given {model!r}")
    if getattr(model, "_course_lib_probe", None) is not None:
        return model
    watcher = _Watcher(model)
    object.__setattr__(model, "_course_lib_probe", watcher)
    return model


class _Watcher:
    """The hooks on one model, and what they have to remember between them."""

    def __init__(self, model: torch.nn.Module) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        self.forward_start = 0.0
        self.backward_start: float | None = None
        self.step = -1
        model.register_forward_pre_hook(self._before_forward, prepend=True)
        model.register_forward_hook(self._after_forward)
        if isinstance(model, DistributedDataParallel):
            self._watch_buckets(model)
        _watch_optimizers()
        _watch_loaders()
        self._engine = torch.autograd.Variable._execution_engine

    def _before_forward(self, model: torch.nn.Module, args: Any) -> None:
        if model.training:
            self.step += 1
            spans.set_step(self.step)
        # By the next forward pass, DDP has waited for all the buckets of the step before.
        self.forward_start = spans.now(waited=True)

    def _after_forward(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        _record("forward", self.forward_start, spans.now())
        self.backward_start = None
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        """Runs when the first gradient reaches the model's output."""
        if self.backward_start is not None:
            return
        self.backward_start = spans.now()
        self._engine.queue_callback(self._backward_computed)

    def _backward_computed(self) -> None:
        """Runs when autograd has computed all gradients, before DDP waits for its buckets.

        DDP queues its own callback when the last bucket is launched; this one was queued before. A callback
        queued from here runs after DDP's.
        """
        computed = spans.now()
        _record("backward", self.backward_start or computed, computed)
        self._engine.queue_callback(lambda: _record("wait", computed, spans.now(waited=True)))

    def _watch_buckets(self, model: Any) -> None:
        """Put a hook of ours around the communication hook of DDP, now or when the learner registers one."""
        if getattr(model, "_comm_hooks", None):
            raise RuntimeError(
                "this model already has a communication hook, and DDP takes only one: call probe(model) "
                "before model.register_comm_hook(...)"
            )
        register = model.register_comm_hook
        current: list[tuple[Any, Callable]] = []

        def hook(state: Any, bucket: Any) -> Any:
            own_state, own_hook = current[0] if current else (None, _average)
            return _timed_bucket(own_hook, own_state, bucket)

        def register_inside(state: object, hook: Callable) -> None:
            if current:
                raise RuntimeError("register_comm_hook can only be called once")
            if not callable(hook):
                raise TypeError("Communication hook must be callable.")
            current.append((state, hook))

        # DDP insists on its own annotations, or none.
        hook.__annotations__ = {}
        register(None, hook)
        object.__setattr__(model, "register_comm_hook", register_inside)


def _average(state: Any, bucket: Any) -> Any:
    """What DDP does without a hook: divide by the number of ranks, then sum over them."""
    import torch.distributed as dist

    gradient = bucket.buffer()
    gradient.div_(dist.get_world_size())
    return dist.all_reduce(gradient, async_op=True).get_future()


def _timed_bucket(hook: Callable, state: Any, bucket: Any) -> Any:
    buffer = bucket.buffer()
    size = buffer.numel() * buffer.element_size()
    label = f"bucket {bucket.index()}"
    step = spans.current_step()
    start = spans.now()
    with spans.labelled(label):
        future = hook(state, bucket)
    recorded = spans.links_record_themselves()

    def arrived(done: Any) -> Any:
        if not recorded:
            end = spans.now()
            spans.record(Span(spans.current_rank(), "all_reduce", start, end, size, LINK, step, label))
        # One callback for both: each costs the step a turn at the GIL. A collective's future holds a list.
        value = done.value()
        return value[0] if isinstance(value, list) else value

    return future.then(arrived)


def _record(name: str, start: float, end: float, bytes: int | None = None, lane: str = COMPUTE) -> None:
    # A paced job's time may step back a little where a delay turns out to be the machine's.
    spans.record(Span(spans.current_rank(), name, start, max(start, end), bytes, lane, spans.current_step()))


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for item in output.values():
            yield from _tensors(item)
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)


_watching_optimizers = False
_watching_loaders = False


def _watch_optimizers() -> None:
    """Record every optimizer step of this process, whichever optimizer it is."""
    global _watching_optimizers
    if _watching_optimizers:
        return
    _watching_optimizers = True
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    started: list[float] = []
    register_optimizer_step_pre_hook(lambda *_: started.append(spans.now()))
    register_optimizer_step_post_hook(lambda *_: _record("optimizer", started.pop(), spans.now()))


def _watch_loaders() -> None:
    """Record how long this process waits for each batch of any DataLoader."""
    global _watching_loaders
    if _watching_loaders:
        return
    _watching_loaders = True
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    fetch = _BaseDataLoaderIter.__next__

    def timed_next(self: Any) -> Any:
        start = spans.now()
        batch = fetch(self)
        # The batch belongs to the step that it is for: the next one.
        step = spans.current_step()
        upcoming = 0 if step is None else step + 1
        spans.record(Span(spans.current_rank(), "input", start, spans.now(), None, INPUT, upcoming))
        return batch

    _BaseDataLoaderIter.__next__ = timed_next  # type: ignore[method-assign]
