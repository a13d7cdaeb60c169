"""The logical clock of a thread: real time, less what the machine rather than the lesson took.

A paced wait that is due at `d` wakes at some `r` a little after `d`, and eight ranks on two cores take turns
for the real work between the waits. Were each such delay kept, they would add up along a ring. So each thread
has a clock that stands at `d` after that wait: `now()` is `time.monotonic()` less a *lag*, and the next wait
is shorter by the lag, which catches it up. Real time is never before logical time.

- A wait carries over at most `CARRIED_SECONDS` of delay of its own; the rest is admitted: the clock moves on,
  and what was lost is counted. So what is measured is never much shorter than what was paced.
- After a paced layer has run in a thread, its clock *absorbs* the machine: processor time and time spent
  queueing for a processor do not advance it, only paced waits and being blocked do. This makes eight ranks
  on two cores behave like eight devices. Threads with real compute do not absorb: there it counts.
- `settle` at a barrier, where people start their stopwatch, drops the lag: no debt passes a barrier, only
  what waking from it took. The end of what is measured is delayed by a wake-up too, so this evens out.

All times are seconds of CLOCK_MONOTONIC, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from typing import Protocol

CARRIED_SECONDS = 0.010
# How long a thread that computes for real keeps its lag: enough to pass a message on, too little to compute.
KEPT_SECONDS = 0.0005


class Debt(Protocol):
    """Something to wait for whose wait this module cannot see, such as a bucket that DDP's C++ waits for.

    due: when it is over, in logical seconds. told: when those who wait were told, in real ones.
    """

    due: float | None
    told: float | None


def _due(debt: Debt) -> float:
    assert debt.due is not None
    return debt.due


class ThreadClock:
    """One thread's logical clock. Use it from that thread only; `current()` gives it."""

    def __init__(self) -> None:
        self.lag = 0.0
        self.worst_lag = 0.0
        self.lost = 0.0
        self.slept = 0.0
        self._stood = 0.0
        self._lag_since = 0.0
        self.absorbing = False
        self._machine_mark = 0.0
        self._debts: list[Debt] = []
        self._schedstat: io.FileIO | None = None
        with contextlib.suppress(OSError):
            self._schedstat = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115

    def now(self) -> float:
        """Logical time, in seconds of CLOCK_MONOTONIC."""
        real = time.monotonic()
        if self.absorbing:
            used = self._machine_seconds()
            self.lag += used - self._machine_mark
            self._machine_mark = used
        elif self.lag:
            # Real compute counts: a transfer must not start before the gradient that it carries exists. So
            # the lag is for what follows a wait at once, and wears off as the thread goes on. Queueing for a
            # processor is not going on.
            going_on = real - self._queued_seconds()
            self.lag = max(0.0, self.lag - max(0.0, going_on - self._lag_since))
            self._lag_since = max(self._lag_since, going_on)
        return real - self.lag

    def sleep_until(self, due: float) -> None:
        """Wait until `due`, a logical time; return at once where that has passed."""
        started = self.now()
        self.slept += max(0.0, due - started)
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)
        self.arrive(started, due)

    def arrive(self, started: float, due: float) -> None:
        """Stand at the later of `started` and `due` after a wait that began at logical time `started`.

        Called after really waiting. What the wait took beyond that becomes lag, up to `CARRIED_SECONDS` or
        the lag there was, and beyond that is lost.
        """
        stand = max(started, due)
        late = max(0.0, time.monotonic() - stand)
        allowed = max(self.lag, CARRIED_SECONDS)
        self._stood = stand
        self.lost += max(0.0, late - allowed)
        self._set_lag(min(late, allowed))

    def stand_at(self, due: float) -> None:
        """Set the clock to `due`, for a thread that was woken to do what was due then."""
        self._set_lag(max(0.0, min(time.monotonic() - due, CARRIED_SECONDS)))

    def settle(self) -> None:
        """Drop the lag; what is more than wake-ups could have made is lost."""
        self.now()
        self.lost += max(0.0, self.lag - CARRIED_SECONDS)
        self._set_lag(0.0)

    def absorb(self, on: bool = True) -> None:
        """Leave processor time and queueing for a processor out of this thread's clock, from here on."""
        if on and not self.absorbing:
            self._machine_mark = self._machine_seconds()
        self.absorbing = on

    def owe(self, debt: Debt) -> None:
        """Note something whose wait happens out of sight; `pay` makes up for it."""
        if self.absorbing:
            self._debts.append(debt)

    def pay(self) -> None:
        """Make up for the waits out of sight, at a point by which they are over: the start of a forward pass.

        The thread stands no earlier than the last of them was due. If it had nothing else to wait for when
        that came due, the delay until it was told is the machine's, and does not count.
        """
        last = max((debt for debt in self._debts if debt.due is not None), key=_due, default=None)
        self._debts.clear()
        if last is None:
            return
        late = self.now() - _due(last)
        if late < 0:
            self._set_lag(max(0.0, self.lag + late))
        elif _due(last) > self._stood and last.told is not None:
            self._set_lag(self.lag + min(late, max(0.0, last.told - _due(last))))

    def behind(self) -> float:
        """Seconds by which this thread's real times exceed the paced ones, beyond what wake-ups take."""
        return self.lost + max(0.0, self.lag - CARRIED_SECONDS)

    def _set_lag(self, lag: float) -> None:
        self.lag = lag
        self.worst_lag = max(self.worst_lag, lag)
        if self.absorbing:
            self._machine_mark = self._machine_seconds()
        elif lag:
            self._lag_since = time.monotonic() - self._queued_seconds() + KEPT_SECONDS

    def _machine_seconds(self) -> float:
        """Seconds this thread has run on a processor or queued for one."""
        # The processor time that schedstat shows may be a tick old, so only the queueing is read there.
        return time.thread_time() + self._queued_seconds()

    def _queued_seconds(self) -> float:
        """Seconds this thread has queued for a processor; 0 where the system does not tell."""
        if self._schedstat is None:
            return 0.0
        self._schedstat.seek(0)
        return int(self._schedstat.read(100).split()[1]) * 1e-9


_local = threading.local()
_all: list[ThreadClock] = []
_lock = threading.Lock()


def current() -> ThreadClock:
    """The clock of the calling thread."""
    clock = getattr(_local, "clock", None)
    if clock is None:
        clock = _local.clock = ThreadClock()
        with _lock:
            _all.append(clock)
    return clock


def behind() -> dict[str, float]:
    """How far the slowest of this process's threads is behind, and the worst lag there was, in seconds."""
    with _lock:
        return {
            "behind_seconds": max(map(ThreadClock.behind, _all), default=0.0),
            "worst_lag_seconds": max((thread.worst_lag for thread in _all), default=0.0),
            "slept_seconds": max((thread.slept for thread in _all), default=0.0),
        }


def reset() -> None:
    """Forget every clock, as a freshly forked rank must."""
    global _local
    with _lock:
        _all.clear()
    _local = threading.local()


def anything_paced() -> bool:
    """Whether a paced layer has run in this process: then its compute times are paced, not measured."""
    with _lock:
        return any(clock.absorbing for clock in _all)
