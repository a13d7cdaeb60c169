"""The real `nn.DataParallel`, on this machine's GPUs: what each of them held, and how long a step took."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

GPUS_NEEDED = 2


@dataclass(frozen=True)
class GpuRun:
    """What `nn.DataParallel` did. peaks: bytes that PyTorch held on each GPU at most. seconds: of each step.

    gradients: of the whole batch, by name, on the CPU.
    """

    peaks: tuple[int, ...]
    seconds: tuple[float, ...]
    gradients: dict[str, Tensor]


def missing(gpus: int | None = None) -> str:
    """Why `nn.DataParallel` cannot be run here; empty where it can. gpus: None for those of this machine."""
    import torch

    gpus = torch.cuda.device_count() if gpus is None else gpus
    if gpus >= GPUS_NEEDED:
        return ""
    return f"nn.DataParallel needs {GPUS_NEEDED} GPUs, and {gpus} can be used here: it is not run."


def run_on_gpus(
    net: nn.Module,
    inputs: Tensor,
    loss: Callable[[Tensor], Tensor],
    devices: int | None = None,
    steps: int = 5,
) -> GpuRun:
    """Run `steps` training steps of a copy of `net` with `nn.DataParallel` on `devices` GPUs (None: on all).

    inputs: the whole batch; it is put on GPU 0 first. The first step, in which kernels are loaded, is not
    timed. Raises RuntimeError where there are fewer than two GPUs.
    """
    import torch
    from torch import nn

    if missing():
        raise RuntimeError(missing())
    count = devices or torch.cuda.device_count()
    module = copy.deepcopy(net).to("cuda:0")
    model = nn.DataParallel(module, device_ids=list(range(count)))
    whole = inputs.to("cuda:0")
    seconds = []
    for step in range(steps + 1):
        module.zero_grad()
        if step == 1:
            for gpu in range(count):
                torch.cuda.reset_peak_memory_stats(gpu)
        start = time.perf_counter()
        loss(model(whole)).backward()
        for gpu in range(count):
            torch.cuda.synchronize(gpu)
        seconds.append(time.perf_counter() - start)
    return GpuRun(
        peaks=tuple(torch.cuda.max_memory_allocated(gpu) for gpu in range(count)),
        seconds=tuple(seconds[1:]),
        gradients={name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None},
    )
