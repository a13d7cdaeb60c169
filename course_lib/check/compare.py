"""Is what came what was expected? Type, structure, shape, dtype, then values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch

TOLERANCES = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (1e-4, 1e-6),
    torch.bfloat16: (2e-2, 1e-2),
    torch.float16: (5e-3, 1e-3),
}
NUMBER_TOLERANCE = (1e-6, 1e-12)
SHOWN = 6


def kind(value: Any) -> str:
    """What a value is, in a learner's words: "a float32 tensor of shape (3, 4)", "a list of 2", "None"."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple, dict, set)):
        return f"a {type(value).__name__} of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def shown(value: Any) -> str:
    """A value in one short line."""
    if isinstance(value, torch.Tensor):
        items = value.detach().reshape(-1)
        text = ", ".join(_number(item) for item in items[:SHOWN].tolist())
        return f"[{text}{', …' if items.numel() > SHOWN else ''}] ({kind(value).removeprefix('a ')})"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, torch.dtype):
        return str(value)
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + " …"


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def mismatch(got: Any, expected: Any, where: str = "") -> tuple[str, str, str] | None:
    """How `got` differs from `expected` in kind, as (diagnosis, what to say, where); None where it does not.

    Lists and tuples count as the same, and so do numbers and tensors with one element and no dimension.
    """
    place = f" in {where}" if where else ""
    if got is None and expected is not None:
        return "nothing returned", f"There is None{place}. Is a `return` missing?", where
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping):
            return _wrong_type(got, expected, where)
        missing = [key for key in expected if key not in got]
        extra = [key for key in got if key not in expected]
        if missing or extra:
            parts = [f"missing: {_listed(missing)}"] if missing else []
            parts += [f"not asked for: {_listed(extra)}"] if extra else []
            return "wrong keys", f"The keys{place} are not those asked for ({'; '.join(parts)}).", where
        pairs = [(got[key], expected[key], f"{where}[{key!r}]") for key in expected]
        return next((m for pair in pairs if (m := mismatch(*pair))), None)
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, (list, tuple)):
            return _wrong_type(got, expected, where)
        if len(got) != len(expected):
            return "wrong length", f"There are {len(got)} items{place} instead of {len(expected)}.", where
        parts_ = ((g, e, f"{where}[{i}]") for i, (g, e) in enumerate(zip(got, expected, strict=True)))
        return next((m for part in parts_ if (m := mismatch(*part))), None)
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return _wrong_type(got, expected, where)
        if got.shape != expected.shape:
            says = f"The shape{place} is {tuple(got.shape)} instead of {tuple(expected.shape)}."
            return "wrong shape", says, where
        if got.dtype != expected.dtype:
            says = f"The dtype{place} is `{got.dtype}` instead of `{expected.dtype}`."
            return "wrong dtype", says, where
        return None
    if isinstance(expected, bool) or not isinstance(expected, Number):
        return None if isinstance(got, type(expected)) else _wrong_type(got, expected, where)
    number = got.item() if isinstance(got, torch.Tensor) and got.dim() == 0 else got
    if isinstance(number, (bool, np.bool_)) or not isinstance(number, (int, float, np.number)):
        return _wrong_type(got, expected, where)
    return None


def _wrong_type(got: Any, expected: Any, where: str) -> tuple[str, str, str]:
    place = f" in {where}" if where else ""
    return "wrong type", f"There is {kind(got)}{place}, where {kind(expected)} is asked for.", where


def _listed(keys: list) -> str:
    text = ", ".join(map(str, keys[:4]))
    return text + (" …" if len(keys) > 4 else "")


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors, numbers and other single values of a structure, each with where it is."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{where}[{index}]")
    else:
        yield where, value


def vector(value: Any) -> torch.Tensor | None:
    """All numbers of a structure in one float64 vector; None where there is something else in it."""
    parts = []
    for _, leaf in leaves(value):
        if isinstance(leaf, torch.Tensor) and not leaf.is_complex():
            parts.append(leaf.detach().reshape(-1).to(torch.float64))
        elif isinstance(leaf, (int, float, np.number)):
            parts.append(torch.tensor([float(leaf)], dtype=torch.float64))
        elif leaf is not None:
            return None
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def equal(got: Any, expected: Any, rtol: float | None = None, atol: float | None = None) -> bool:
    """Whether two single values of the same kind are equal, as far as their dtype can tell."""
    if isinstance(expected, torch.Tensor):
        if not (expected.is_floating_point() or expected.is_complex()):
            return torch.equal(got, expected)
        own = TOLERANCES.get(expected.dtype, (1e-4, 1e-6))
        return torch.allclose(
            got.detach(),
            expected.detach(),
            rtol=own[0] if rtol is None else rtol,
            atol=own[1] if atol is None else atol,
            equal_nan=True,
        )
    if isinstance(expected, (int, float)) and not isinstance(expected, bool):
        number = got.item() if isinstance(got, torch.Tensor) else got
        own = NUMBER_TOLERANCE
        return math.isclose(
            number,
            expected,
            rel_tol=own[0] if rtol is None else rtol,
            abs_tol=own[1] if atol is None else atol,
        )
    return bool(got == expected)
