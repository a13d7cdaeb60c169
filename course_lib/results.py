"""What may travel back from a rank: data, and nothing that runs code when it is loaded.

`pack` turns a rank's return value into bytes; `unpack` turns them back. Both go through one list of
allowed types, so that a value which could not be read is refused where it was made, with its name.
Tensors travel as raw bytes, on the CPU and without their graph.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

ALLOWED = {
    "builtins": {"set", "frozenset", "complex", "bytearray", "range", "slice"},
    "collections": {"OrderedDict", "defaultdict", "deque", "Counter"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size", "device"},
    "course_lib.spans": {"Span"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
}
DEFAULT_FACTORIES = {"builtins": {"list", "dict", "int", "float", "str", "tuple"}}
WHAT_MAY_RETURN = "numbers, strings, lists, tuples, dicts, sets, tensors, state dicts and NumPy arrays"


class CannotReturn(TypeError):
    """A rank returned something that cannot come back as data."""


class _Packer(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.dtype):
            return "dtype", str(value).removeprefix("torch.")
        if not isinstance(value, torch.Tensor):
            return None
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise CannotReturn(
                f"a {type(value).__name__} cannot come back; return a plain tensor"
                + (" (call .full_tensor() on it first)" if hasattr(value, "full_tensor") else "")
            )
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise CannotReturn("a sparse, quantized or meta tensor cannot come back; return value.to_dense()")
        plain = value.detach().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", str(plain.dtype).removeprefix("torch."), tuple(plain.shape), value.requires_grad, raw


class _Unpacker(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()) or name in DEFAULT_FACTORIES.get(module, ()):
            return super().find_class(module, name)
        raise CannotReturn(f"an object made by {module}.{name}")

    def persistent_load(self, parts: Any) -> Any:
        import torch

        if parts[0] == "dtype":
            dtype = getattr(torch, parts[1])
            if not isinstance(dtype, torch.dtype):
                raise CannotReturn(f"torch.{parts[1]} as a dtype")
            return dtype
        _, dtype_name, shape, requires_grad, raw = parts
        dtype = getattr(torch, dtype_name)
        flat = (
            torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        )
        return flat.view(dtype).reshape(shape).requires_grad_(requires_grad)


def unpack(data: bytes) -> Any:
    """The value that `pack` made `data` of. Raises CannotReturn for anything that is not plain data."""
    return _Unpacker(io.BytesIO(data)).load()


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer, protocol=5).dump(value)
    data = buffer.getvalue()
    unpack(data)
    return data


def _find_culprit(value: Any, where: str, depth: int = 0) -> tuple[str, Any]:
    """The innermost part of `value` that cannot come back, as an expression, and that part."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{where}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = [(f"{where}[{index}]", item) for index, item in enumerate(value)]
    for expression, item in parts if depth < 8 else []:
        try:
            _dump(item)
        except Exception:
            return _find_culprit(item, expression, depth + 1)
    return where, value


def _advice(value: Any) -> str:
    import torch

    if isinstance(value, torch.nn.Module):
        return "return its state_dict() instead"
    if hasattr(value, "_asdict") or hasattr(value, "__dataclass_fields__"):
        return "return it as a dict instead"
    if callable(value):
        return "return what it computes instead"
    return f"return {WHAT_MAY_RETURN}"


def pack(value: Any, name: str = "result") -> bytes:
    """`value` as bytes; `name` is what to call it.

    Raises CannotReturn, naming the part that cannot come back and what to return instead.
    """
    try:
        return _dump(value)
    except Exception as error:
        where, culprit = _find_culprit(value, name)
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
        reason = (
            f" ({error})" if isinstance(error, CannotReturn) and "object made by" not in str(error) else ""
        )
        raise CannotReturn(
            f"{where} is a {kind}, which cannot come back{reason}: {_advice(culprit)}"
        ) from error
