"""The handles that a paced group gives out: one for a collective, one for each end of a message.

They are Works as torch.distributed knows them. A `wait` returns once the real transfer is done and its paced
time is over, whichever is later. Where C++ waits for a future instead, as DDP does, a timer thread completes
that when it is due.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from course_lib import clock


class Timer:
    """One thread that does things when they are due, in order of time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None

    def at(self, due: float, action: Callable[[], None]) -> None:
        """Do `action` at `due`, seconds of CLOCK_MONOTONIC, or at once if that has passed."""
        with self._changed:
            heapq.heappush(self._heap, (due, next(self._order), action))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paced timer", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self) -> None:
        """End the thread once it has nothing left to do."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while True:
                    left = self._heap[0][0] - time.monotonic() if self._heap else None
                    if left is not None and left <= 0:
                        break
                    if left is None and self._thread is not threading.current_thread():
                        return
                    self._changed.wait(left)
                due, _, action = heapq.heappop(self._heap)
            # What a callback issues starts when the collective before was due, not when this thread woke.
            clock.current().stand_at(due)
            try:
                action()
            except Exception:
                # A callback's fault must not keep other collectives from completing.
                traceback.print_exc()


TIMER = Timer()


class PacedWork(dist.Work):
    """A collective on its way through the group's queue.

    outputs: what the future holds, as gloo's would. settles: whether the thread's lag from before is dropped.
    """

    def __init__(self, outputs: list[Any], settles: bool = False) -> None:
        super().__init__()
        self.due: float | None = None
        self.told: float | None = None
        self._outputs = outputs
        self._settles = settles
        self._error: BaseException | None = None
        self._carried = threading.Event()
        self._lock = threading.Lock()
        self._future: torch.futures.Future | None = None
        self._complete: Callable[[], None] | None = None

    def carried(self, due: float) -> None:
        """The real transfer is done; the paced one is over at `due`."""
        with self._lock:
            self.due = due
            self._carried.set()
            if self._complete is not None:
                TIMER.at(due, self._complete)

    def failed(self, error: BaseException) -> None:
        """The real transfer did not work out; whoever waits gets `error`."""
        self._error = error
        self.carried(time.monotonic())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is carried and due. Raises what the transfer raised."""
        thread = clock.current()
        started = thread.now()
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if not self._carried.wait(seconds if seconds > 0 else None):
            raise RuntimeError(f"waited {seconds:g} s for a paced collective that has not finished")
        if self._error is not None:
            raise self._error
        assert self.due is not None
        if self._settles:
            thread.settle()
            if self.due < time.monotonic():
                # The others have left: what follows is measured from here, not from when it was due.
                return True
        while (left := self.due - time.monotonic()) > 0:
            time.sleep(left)
        thread.arrive(started, self.due)
        return True

    def get_future(self) -> torch.futures.Future:
        """A future that is completed when it is due, with the outputs or the error."""
        with self._lock:
            if self._future is None:
                carried: torch.futures.Future = torch.futures.Future()
                # An error must be raised inside C++ to reach those who wait there; `then` does that.
                self._future = carried.then(self._unwrap)
                self._complete = lambda: self._tell(carried)
                clock.current().owe(self)
                if self.due is not None:
                    TIMER.at(self.due, self._complete)
            return self._future

    def _tell(self, carried: torch.futures.Future) -> None:
        self.told = time.monotonic()
        carried.set_result(None)

    def _unwrap(self, _: torch.futures.Future) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._outputs

    def is_completed(self) -> bool:
        """Whether a wait would return at once."""
        return self.due is not None and self.due <= time.monotonic()

    def is_success(self) -> bool:
        """Whether it has completed without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error, if there was one."""
        return self._error

    def result(self) -> list[Any]:
        """The outputs."""
        return self._outputs

    def synchronize(self) -> None:
        """The same as `wait`; there is no stream to synchronize with."""
        self.wait()


class MessageWork(dist.Work):
    """One end of a message. Real operations were posted by the caller; `finish` tells when it is due.

    No queue and no thread stand between a rank and its messages: a ring of ranks that each wait for the one
    before would be stuck behind the head of such a queue.
    """

    def __init__(
        self, outputs: list[torch.Tensor], finish: Callable[[timedelta | None], tuple[float, int]]
    ) -> None:
        super().__init__()
        self.due: float | None = None
        self._outputs = outputs
        self._finish = finish
        self._source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is carried and due, by the caller's clock."""
        thread = clock.current()
        started = thread.now()
        if self.due is None:
            self.due, self._source = self._finish(timeout)
        while (left := self.due - time.monotonic()) > 0:
            time.sleep(left)
        thread.arrive(started, self.due)
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for and is due. As on gloo, only `wait` gets it there."""
        return self.due is not None and self.due <= time.monotonic()

    def is_success(self) -> bool:
        """The same as `is_completed`; errors are raised by `wait`."""
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._outputs

    def source_rank(self) -> int:
        """The rank in the group that it came from, once it has been waited for."""
        return self._source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def get_future(self) -> torch.futures.Future:
        """Not there, as on gloo."""
        raise NotImplementedError("send and recv have no future on this backend, as on gloo; call wait()")
