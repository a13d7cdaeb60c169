"""The rank's side of a check: call the learner's code, and see what it did to its inputs."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from course_lib.check.trouble import STUB_TEXTS

SEED = 1000


class StubReached(Exception):
    """The learner's code came to a part that is not written yet."""


def observe(
    answer: Any,
    via: Callable | None,
    inputs_by_rank: Sequence[tuple],
    may_edit: bool,
    stagger: float,
) -> dict[str, Any]:
    """Run the answer on this rank: {"value": what it gave} or {"unreturnable": its type}, and "edited".

    Ranks are seeded differently on purpose: an answer that needs equal seeds is wrong.
    """
    from course_lib.results import CannotReturn, pack

    rank = int(os.environ["RANK"])
    inputs = inputs_by_rank[rank]
    before = copy.deepcopy(inputs) if not may_edit else ()
    torch.manual_seed(SEED + rank)
    time.sleep(stagger * rank)
    try:
        value = answer(*inputs) if via is None else via(answer, *inputs)
    except NotImplementedError as error:
        if str(error) in STUB_TEXTS:
            raise StubReached from error
        raise
    edited = None if may_edit else changed(before, inputs)
    try:
        pack(value)
    except CannotReturn as error:
        return {"unreturnable": type(value).__name__, "why": str(error), "edited": edited}
    return {"value": value, "edited": edited}


def changed(before: Any, after: Any, where: str = "") -> str | None:
    """The first part of an input that is no longer what it was, such as "argument 1['x']"; None for none."""
    if isinstance(before, torch.Tensor):
        same = (
            isinstance(after, torch.Tensor)
            and before.shape == after.shape
            and before.dtype == after.dtype
            and torch.equal(_bits(before), _bits(after))
        )
        return None if same else where
    if isinstance(before, np.ndarray):
        return None if before.tobytes() == after.tobytes() else where
    if isinstance(before, dict):
        if list(before) != list(after):
            return where
        parts = [(before[key], after[key], f"{where}[{key!r}]") for key in before]
    elif isinstance(before, (list, tuple)):
        if len(before) != len(after):
            return where
        names = [f"argument {i + 1}" if not where else f"{where}[{i}]" for i in range(len(before))]
        parts = list(zip(before, after, names, strict=True))
    else:
        return None if not isinstance(before, (int, float, str)) or before == after else where
    return next((found for part in parts if (found := changed(*part)) is not None), None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: NaN is then equal to itself."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
