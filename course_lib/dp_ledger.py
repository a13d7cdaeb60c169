"""The books of data parallel: every copy between devices, what each device holds, and what it should be.

A `Step` is one forward and backward pass of `dp.DataParallelByHand`: its movements, each with its copies and
with what every device held when it was over. `movement_bytes` is the arithmetic that the books must agree
with. A device's `Memory` follows the storages of real tensors, and notices when Python lets them go.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SCATTER, REPLICATE, APPLY, GATHER = (
    "scatter inputs",
    "replicate model",
    "parallel apply",
    "gather outputs",
)
SCATTER_GRADIENTS, BACKWARD, REDUCE = "scatter output gradients", "parallel backward", "reduce gradients"
MOVEMENTS = (SCATTER, REPLICATE, APPLY, GATHER, SCATTER_GRADIENTS, REDUCE)
# The backward pass of "parallel apply": the loss lies between 4 and 5, this between 5 and 6.
IN_ORDER = (SCATTER, REPLICATE, APPLY, GATHER, SCATTER_GRADIENTS, BACKWARD, REDUCE)

KINDS = ("parameters", "replica", "inputs", "activations", "outputs", "output gradients", "gradients")


class Memory:
    """What one device holds, by kind, in bytes. A storage counts once, for as long as anything uses it."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        # A freed storage may call back from the garbage collector, in the middle of `hold`.
        self._lock = threading.RLock()
        self._held: dict[int, tuple[str, int]] = {}

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Note that the device holds these tensors, as `kind`, until they are freed.

        A storage that it holds already (a view of the batch, a weight that autograd saves) keeps its kind.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
            with self._lock:
                if not size or place in self._held:
                    continue
                self._held[place] = (kind, size)
                self.now[kind] = self.now.get(kind, 0) + size
                if sum(self.now.values()) > sum(self.peak.values()):
                    self.peak = dict(self.now)
            weakref.finalize(storage, self._free, place).atexit = False

    def _free(self, place: int) -> None:
        with self._lock:
            kind, size = self._held.pop(place)
            self.now[kind] -= size

    def forget_peak(self) -> None:
        """Start a new peak from what is held now."""
        with self._lock:
            self.peak = self.snapshot()

    def snapshot(self) -> dict[str, int]:
        """What is held now, by kind, without kinds of which nothing is."""
        with self._lock:
            return {kind: size for kind, size in self.now.items() if size}


@dataclass(frozen=True)
class Copy:
    """Tensors that went from one device to another.

    start, end: when the target began to take them in, and had them; seconds of `time.monotonic()`.
    """

    source: int
    target: int
    bytes: int
    start: float
    end: float


@dataclass(frozen=True)
class Movement:
    """One movement of a step.

    copies: what went over links. work: (device, start, end) of each device's computing. memory: by device,
    what each held when the movement was over, by kind.
    """

    name: str
    start: float
    end: float
    copies: tuple[Copy, ...] = ()
    work: tuple[tuple[int, float, float], ...] = ()
    memory: tuple[Mapping[str, int], ...] = ()

    @property
    def number(self) -> int | None:
        """Its place among the six, from 1; None for the backward pass between the last two."""
        return MOVEMENTS.index(self.name) + 1 if self.name in MOVEMENTS else None

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start

    @property
    def bytes(self) -> int:
        """All that was copied between devices."""
        return sum(copy.bytes for copy in self.copies)


@dataclass
class Step:
    """One forward pass by `devices` devices, of which `used` had work; and its backward pass, once done.

    rows: how many rows of the batch each device got. kind: "paced" or "measured". peaks: by device, what it
    held when it held most, by kind.
    """

    devices: int
    rows: tuple[int, ...]
    kind: str
    movements: list[Movement] = field(default_factory=list)
    peaks: list[Mapping[str, int]] = field(default_factory=list)

    @property
    def used(self) -> int:
        """How many devices had work."""
        return len(self.rows)

    def __getitem__(self, name: str) -> Movement:
        """The movement of this name. KeyError names those there are."""
        for movement in self.movements:
            if movement.name == name:
                return movement
        raise KeyError(f"no movement {name!r}; there are {', '.join(m.name for m in self.movements)}")

    def bytes_by_movement(self) -> dict[str, int]:
        """The bytes that each of the movements copied between devices."""
        return {m.name: m.bytes for m in self.movements if m.number is not None}

    def sent(self, device: int) -> int:
        """The bytes that left `device` over its link."""
        return sum(c.bytes for m in self.movements for c in m.copies if c.source == device)

    def received(self, device: int) -> int:
        """The bytes that came to `device` over its link."""
        return sum(c.bytes for m in self.movements for c in m.copies if c.target == device)

    def peak(self, device: int) -> int:
        """The most bytes that `device` held at once."""
        return sum(self.peaks[device].values())

    def _lines(self) -> list[tuple[str, str, str, str]]:
        lines = []
        for m in self.movements:
            out = sum(c.bytes for c in m.copies if c.source == 0)
            number = "" if m.number is None else str(m.number)
            sent = f"{out:,} out" if out else f"{m.bytes:,} in" if m.bytes else "-"
            lines.append((number, m.name, sent, f"{m.seconds * 1e3:.1f}"))
        return lines

    def _headline(self) -> str:
        rows = " + ".join(map(str, self.rows))
        return f"{self.used} of {self.devices} devices had work ({rows} rows), {self.kind}"

    def __repr__(self) -> str:
        lines = [f"{n:>2} {name:26}{sent:>20}{ms:>9} ms" for n, name, sent, ms in self._lines()]
        return "\n".join([self._headline(), *lines])

    def _repr_html_(self) -> str:
        right = " style='text-align:right'"
        heads = "".join(
            f"<th scope='col'{right if index > 1 else ''}>{name}</th>"
            for index, name in enumerate(("", "movement", "bytes on device 0's link", "ms"))
        )
        rows = "".join(
            f"<tr><td>{n}</td><th scope='row' style='text-align:left'>{escape(name)}</th>"
            f"<td{right}>{sent}</td><td{right}>{ms}</td></tr>"
            for n, name, sent, ms in self._lines()
        )
        return f"<div>{escape(self._headline())}</div><table><tr>{heads}</tr>{rows}</table>"


def parts_of(rows: int, devices: int) -> tuple[int, ...]:
    """How many rows each device gets, as `Tensor.chunk` cuts them: ceil(rows/devices) each, the last fewer.

    A batch may give out before the devices do: 5 rows on 4 devices are 2 + 2 + 1. ValueError for a count
    below 1.
    """
    for name, value in (("rows", rows), ("devices", devices)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: give a whole number from 1 on")
    each = math.ceil(rows / devices)
    full, rest = divmod(rows, each)
    return (each,) * full + ((rest,) if rest else ())


def movement_bytes(
    rows: int, devices: int, *, parameters: int, buffers: int = 0, input_row: int, output_row: int
) -> dict[str, int]:
    """The bytes that each movement must copy between devices, by name; all of them over device 0's link.

    parameters, buffers: bytes of the model, all of it trainable. input_row, output_row: bytes of one row.
    With n devices at work, of which device 0 keeps its own r0 rows: (n-1)(parameters + buffers) to replicate,
    (n-1) parameters to reduce, and (rows - r0) rows of inputs out, outputs in, output gradients out.
    """
    parts = parts_of(rows, devices)
    elsewhere, others = rows - parts[0], len(parts) - 1
    return {
        SCATTER: elsewhere * input_row,
        REPLICATE: others * (parameters + buffers),
        APPLY: 0,
        GATHER: elsewhere * output_row,
        SCATTER_GRADIENTS: elsewhere * output_row,
        REDUCE: others * parameters,
    }


def peak_bytes(
    rows: int,
    devices: int,
    *,
    parameters: int,
    buffers: int = 0,
    input_row: int,
    output_row: int,
    activation_row: int = 0,
) -> tuple[int, int]:
    """The most bytes that device 0 holds at once, and that each other device with a full part does.

    All have the model, their activations or later their gradients, and their own rows. Device 0 has all rows
    of the batch, of the outputs and of the outputs' gradients, and a second set of gradients: they land there
    one device after another. Per device r rows of the batch, n devices, M the model, P its parameters:
    M + n r i + 2 n r o + max(r a, 2 P) against M + r i + r o + max(r a, P). One device alone has M + r i +
    2 r o + max(r a, P). What the loss itself keeps is not counted.
    """
    parts = parts_of(rows, devices)
    model, activations = parameters + buffers, parts[0] * activation_row
    landing = parameters if len(parts) > 1 else 0
    main = model + rows * (input_row + 2 * output_row) + max(activations, parameters + landing)
    if len(parts) == 1:
        return main, 0
    return main, model + parts[0] * (input_row + output_row) + max(activations, parameters)
