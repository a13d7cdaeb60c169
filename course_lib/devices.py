"""The device that belongs to this rank: the same two lines serve CPUs and GPUs.

model = model.to(device())
model = DistributedDataParallel(model, device_ids=device_ids())
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def device() -> torch.device:
    """This rank's device: its own GPU where the process group runs on NCCL, the CPU elsewhere.

    Works under `launch` and under torchrun, once the process group exists.
    """
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def device_ids() -> list[int] | None:
    """What DistributedDataParallel wants as `device_ids`: [this rank's GPU], or None on the CPU."""
    own = device()
    return [own.index] if own.type == "cuda" else None
