"""What the exercises of chapter 04 run in the ranks: models, training steps, and what DDP makes of them."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.pace import Pace
from course_lib.simulate import Layer

TIMED: dict[str, Any] = {"layers": 8, "width": 256, "forward_ms": 2.0, "backward_ms": 10.0, "cap_mb": 0.5}
TIMED_PACE = Pace(gbps=0.2, latency_us=50)
LINK = Pace(gbps=1, latency_us=1500)
LINK_RANKS = 4
LINK_MODEL: dict[str, Any] = {"layers": 16, "width": 384, "forward_ms": 2.0, "backward_ms": 8.0}
STEPS = 3
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class ModelSpec:
    """A stack of linear layers. widths: inputs, hidden, outputs. frozen: which layers do not train.

    tied: the last layer shares the first one's weight.
    """

    name: str
    widths: tuple[int, ...]
    dtype: str = "float32"
    bias: bool = True
    frozen: tuple[int, ...] = ()
    tied: bool = False

    def build(self) -> nn.Sequential:
        """The model, with the same first weights on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            layers: list[nn.Module] = []
            for before, after in zip(self.widths, self.widths[1:], strict=False):
                layers += [nn.Linear(before, after, bias=self.bias), nn.Tanh()]
            model = nn.Sequential(*layers[:-1]).to(getattr(torch, self.dtype))
        linear = [layer for layer in model if isinstance(layer, nn.Linear)]
        for position in self.frozen:
            linear[position].requires_grad_(False)
        if self.tied:
            linear[-1].weight = linear[0].weight
        return model

    def parameter_bytes(self) -> list[int]:
        """The bytes of each parameter that trains, in the order of `parameters()`."""
        return [p.nbytes for p in self.build().parameters() if p.requires_grad]

    def batches(self, whole: int) -> list[Tensor]:
        """Reshuffled inputs, one batch a step."""
        generator = torch.Generator().manual_seed(11)
        data = torch.randn(whole, self.widths[0], generator=generator, dtype=torch.float64)
        orders = [torch.randperm(whole, generator=generator) for _ in range(STEPS)]
        return [data[order].to(getattr(torch, self.dtype)) for order in orders]


def layers_of(model: dict[str, Any]) -> list[Layer]:
    """A paced model, as the simulator sees it."""
    seconds = model["forward_ms"] / 1e3, model["backward_ms"] / 1e3
    return [Layer("linear", (model["width"] ** 2 * 4,), *seconds)] * model["layers"]


def link_model() -> list[Layer]:
    """The model of exercise 4.3, as the simulator sees it."""
    return layers_of(LINK_MODEL)


def loss_of(outputs: Tensor) -> Tensor:
    """A loss that is a mean over the batch, so that the mean of equal parts is the whole."""
    return (outputs - 0.5).square().mean()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients, by parameter name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def oracle(spec: ModelSpec, ranks: int) -> tuple[list[dict[str, Tensor]], list[list[dict[str, Tensor]]]]:
    """One process on the whole batch: each step's gradients; and what each rank's own part would give.

    The second by step and rank, at the weights that the whole batch has led to.
    """
    model = spec.build()
    whole, local = [], []
    for batch in spec.batches(4 * ranks):
        own = []
        for part in batch.chunk(ranks):
            alone = copy.deepcopy(model)
            loss_of(alone(part)).backward()
            own.append(gradients_of(alone))
        local.append(own)
        loss_of(model(batch)).backward()
        whole.append(gradients_of(model))
        _step(model)
    return whole, local


def _step(model: nn.Module) -> None:
    """One step of SGD; gradients are then None."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
                parameter.grad = None


def predict_in_rank(predict: Any, specs: list[ModelSpec], caps: list[float]) -> list[Any]:
    """What the learner predicts for each model and cap."""
    return [predict(spec.build(), cap) for spec, cap in zip(specs, caps, strict=True)]


def real_buckets(ddp: Any, specs: list[ModelSpec], caps: list[float]) -> list[list[int]]:
    """The buckets that DDP really makes, from its own log. ddp: `DistributedDataParallel`."""
    from course_lib.ddp_log import ddp_log

    found = []
    for spec, cap in zip(specs, caps, strict=True):
        model = ddp(spec.build(), bucket_cap_mb=cap)
        batch = spec.batches(4)[0]
        for _ in range(3):  # rebuilt before the second backward, in the log from the third on
            model.zero_grad()
            loss_of(model(batch)).backward()
        log = ddp_log(model)
        found.append(log["rebuilt_buckets"] or log["buckets"])
    return found


def train_in_rank(ddp_class: Any, spec: ModelSpec, cap_mb: float) -> list[dict[str, Tensor]]:
    """Each step's gradients, with the learner's class between backward and the optimizer."""
    import torch.distributed as dist

    model = spec.build()
    wrapped = ddp_class(model, cap_mb)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    steps = []
    for batch in spec.batches(4 * ranks):
        loss_of(model(batch.chunk(ranks)[rank])).backward()
        wrapped.finish()
        steps.append(gradients_of(model))
        _step(model)
    return steps


class AfterBackward:
    """The reference without overlap: the same buckets, all of them sent when backward is done."""

    def __init__(self, model: nn.Module, cap_mb: float) -> None:
        from course_lib.buckets import assign_buckets

        parameters = [p for p in model.parameters() if p.requires_grad]
        assigned = assign_buckets([p.nbytes for p in parameters], cap_mb)
        self.buckets = [[parameters[position] for position in bucket] for bucket in assigned]

    def finish(self) -> None:
        """Send each bucket and wait for it."""
        import torch.distributed as dist

        for bucket in self.buckets:
            flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
            flat /= dist.get_world_size()
            dist.all_reduce(flat)
            for p, average in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if p.grad is not None:
                    p.grad.copy_(average.view_as(p))


def time_in_rank(
    ddp_class: Any, layers: int, width: int, forward_ms: float, backward_ms: float, cap_mb: float, steps: int
) -> list[dict[str, float]]:
    """Seconds of the parts of each step but the first, on the paced clock."""
    import torch.distributed as dist

    from course_lib.paced_layers import paced_mlp
    from course_lib.spans import now

    torch.manual_seed(0)
    model = paced_mlp(layers, width, forward_ms, backward_ms)
    wrapped = ddp_class(model, cap_mb)
    batch = torch.randn(2, width)
    timed = []
    for _ in range(steps + 1):
        dist.barrier()
        start = now()
        loss = model(batch).square().mean()
        forward = now()
        loss.backward()
        backward = now()
        wrapped.finish()
        end = now()
        model.zero_grad()
        timed.append({"step": end - start, "backward": backward - forward, "finish": end - backward})
    return timed[1:]


def time_ddp_in_rank(
    ddp: Any, layers: int, width: int, forward_ms: float, backward_ms: float, cap_mb: float
) -> list[float]:
    """Seconds of each step of real DDP but the first. ddp: `DistributedDataParallel`."""
    from course_lib.paced_layers import paced_mlp

    model = ddp(paced_mlp(layers, width, forward_ms, backward_ms), bucket_cap_mb=cap_mb)
    batch = torch.randn(2, width)
    seconds = []
    for _ in range(4):
        start = time.monotonic()
        model(batch).square().mean().backward()
        model.zero_grad()
        seconds.append(time.monotonic() - start)
    return seconds[1:]
