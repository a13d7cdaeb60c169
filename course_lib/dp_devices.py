"""Virtual devices: each is a thread that computes, a link that may be paced, and a memory that is counted.

A `Fleet` is the devices of one model. It does the two things that a movement of data parallel is made of,
copying over links and computing on all devices at once, and keeps the books of both in a `Step`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from course_lib import clock
from course_lib.dp_ledger import Copy, Memory, Movement, Step
from course_lib.link import Link
from course_lib.pace import Pace

THREAD_NAME = "virtual-device"
Parcel = tuple["VirtualDevice", "VirtualDevice", Sequence[Tensor]]


class VirtualDevice:
    """One device. Its tensors lie in this machine's memory; `memory` counts them."""

    def __init__(self, index: int, pace: Pace) -> None:
        self.index = index
        self.memory = Memory()
        self.link = Link(pace.bytes_per_second, pace.latency)


@functools.cache
def _thread_of(index: int) -> ThreadPoolExecutor:
    """The thread of device `index`, made once; it serves every model in turn."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{THREAD_NAME}-{index}")


class Fleet:
    """`count` devices whose links have this pace. bytes_sent, bytes_received: by device, of all movements."""

    def __init__(self, count: int, pace: Pace) -> None:
        self.pace = pace
        self.devices = [VirtualDevice(index, pace) for index in range(count)]
        self.bytes_sent, self.bytes_received = [0] * count, [0] * count

    def move(
        self,
        step: Step,
        name: str,
        kind: str,
        parcels: Iterable[Parcel],
        take: Callable[[list[Tensor]], None],
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy each parcel (source, target, tensors) and hand the copies to `take`; then call `finish`.

        All parcels set off at once and queue on the links. Lasts until the slowest has arrived, in real
        copying or at the links' pace, whichever is later.
        """
        began = time.monotonic()
        copies = []
        for source, target, tensors in parcels:
            start = time.monotonic()
            landed = [tensor.detach().clone() for tensor in tensors]
            end = time.monotonic()
            size = sum(tensor.nbytes for tensor in landed)
            target.memory.hold(kind, landed)
            if self.pace.holds_back and size:
                left, _ = source.link.send(began, size)
                start, end = target.link.receive(left, size)
            copies.append(Copy(source.index, target.index, size, start, end))
            self.bytes_sent[source.index] += size
            self.bytes_received[target.index] += size
            take(landed)
            del landed, tensors
        finish()
        due = max((copy.end for copy in copies), default=began)
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)
        self._note(step, Movement(name, began, time.monotonic(), tuple(copies)))

    def run(self, step: Step, name: str, work: Callable, *columns: Sequence[Any]) -> list[Any]:
        """Call work(device, …) on every device that has work at once, each on its own thread.

        columns: the other arguments, by device. Waits for all; then raises the first error, if there was one,
        and says on which device it was.
        """
        began = time.monotonic()
        rows = list(zip(self.devices[: step.used], *columns, strict=True))
        futures = [_thread_of(row[0].index).submit(_timed, work, *row) for row in rows]
        del rows
        wait(futures)
        for index, future in enumerate(futures):
            error = future.exception()
            if error is not None:
                raise RuntimeError(
                    f"device {index} of {step.used} failed in {name}, with {step.rows[index]} of the batch's "
                    f"{sum(step.rows)} rows: {type(error).__name__}: {error}"
                ) from error
        done = [future.result() for future in futures]
        spent = tuple((index, start, end) for index, (start, end, _) in enumerate(done))
        self._note(step, Movement(name, began, time.monotonic(), work=spent))
        return [result for _, _, result in done]

    def _note(self, step: Step, movement: Movement) -> None:
        memory = tuple(device.memory.snapshot() for device in self.devices)
        step.movements.append(dataclasses.replace(movement, memory=memory))
        step.peaks = [dict(device.memory.peak) for device in self.devices]


def _timed(work: Callable, *arguments: Any) -> tuple[float, float, Any]:
    """What `work` gave, and when it started and ended. Each device starts with its paced clock set right."""
    clock.current().settle()
    start = time.monotonic()
    result = work(*arguments)
    return start, time.monotonic(), result
