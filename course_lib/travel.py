"""How a function travels to the ranks: by value, with the notebook variables it uses.

cloudpickle does the work. This module adds what a learner needs when it fails: the name of the object
that cannot travel.
"""

from __future__ import annotations

import collections
import inspect
import io
import pickle
import types
import typing
from collections.abc import Callable
from typing import Any

import cloudpickle

LARGE_BYTES = 50 * 2**20


class CannotTravel(TypeError):
    """The function, or something that it uses, cannot be sent to another process."""


class _Pickler(cloudpickle.CloudPickler):
    """cloudpickle, but code keeps the file it came from, so that tracebacks name the learner's cell."""

    @staticmethod
    def _reduce_code(code: types.CodeType) -> tuple:
        make, parts, *rest = cloudpickle.CloudPickler.dispatch_table[types.CodeType](code)
        named = tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)
        return make, named, *rest

    dispatch_table: typing.ClassVar = collections.ChainMap(
        {types.CodeType: _reduce_code.__func__},  # type: ignore[attr-defined]
        cloudpickle.CloudPickler.dispatch_table,
    )


def pack_call(function: Callable, args: tuple, kwargs: dict) -> bytes:
    """The call as bytes for a rank to load. Raises CannotTravel, naming the object that cannot travel."""
    try:
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump((function, args, kwargs))
        return buffer.getvalue()
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        where, culprit, reason = _find_culprit(function, args, kwargs, error)
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
        raise CannotTravel(
            f"{where} is a {kind}, which cannot be sent to another process ({reason}). "
            "Create it inside the function, or pass what it is made from."
        ) from error


def unpack_call(data: bytes) -> tuple[Callable, tuple, dict]:
    """The call that `pack_call` made `data` of. Only ever given bytes from this process's own launcher."""
    return pickle.loads(data)


def used_variables(function: Callable) -> dict[str, Any]:
    """The variables from outside that `function` uses: globals, closure and defaults, by name."""
    function = inspect.unwrap(function)
    if not inspect.isfunction(function):
        return {}
    names = inspect.getclosurevars(function)
    return {**names.globals, **names.nonlocals}


def large_variables(function: Callable, args: tuple, kwargs: dict) -> dict[str, int]:
    """How many bytes each variable that travels with the call takes, those above 1 MiB."""
    named = {**used_variables(function), **{f"args[{i}]": a for i, a in enumerate(args)}, **kwargs}
    sizes = {}
    for name, value in named.items():
        size = _size(value)
        if size and size > 2**20:
            sizes[name] = size
    return sizes


def _size(value: Any) -> int | None:
    try:
        return len(cloudpickle.dumps(value))
    except Exception:
        return None


def _failure(value: Any) -> str | None:
    try:
        cloudpickle.dumps(value)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return str(error) or type(error).__name__
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if inspect.isfunction(value):
        return [(f"'s variable {name}", item) for name, item in used_variables(value).items()]
    if inspect.ismethod(value):
        return [(".__self__", value.__self__)]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return [(f".{name}", item) for name, item in vars(value).items()]
    return []


def _find_culprit(
    function: Callable, args: tuple, kwargs: dict, error: BaseException
) -> tuple[str, Any, str]:
    """The innermost object that cannot travel: where it is, the object, and why."""
    name = getattr(function, "__name__", type(function).__name__)
    roots = [(f"{name}'s argument {i}", a) for i, a in enumerate(args)]
    roots += [(f"{name}'s argument {key}", a) for key, a in kwargs.items()]
    roots += [(f"`{key}`, which {name} uses,", a) for key, a in used_variables(function).items()]
    roots += [(name, function)]
    for where, value in roots:
        reason = _failure(value)
        if reason is None:
            continue
        for _ in range(8):
            inner = next(
                (
                    (suffix, item, why)
                    for suffix, item in _parts(value)
                    if (why := _failure(item)) is not None
                ),
                None,
            )
            if inner is None:
                break
            where, value, reason = where.rstrip(",") + inner[0], inner[1], inner[2]
        return where, value, reason
    return name, function, str(error)
