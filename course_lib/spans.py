"""What happened when: the record that every run, real or simulated, is made of.

A `Span` is one stretch of time on one rank. Inside a rank, `record` collects them; `drain` hands over
what has been collected since the last call. All times are `time.monotonic()`, which is one clock for all
processes of a machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

COMPUTE = "compute"
LINK = "link"
INPUT = "input"


@dataclass(frozen=True)
class Span:
    """One stretch of time on one rank.

    rank: who. name: what ("forward", "backward", "all_reduce", "optimizer", "input", or your own word).
    start, end: seconds of `time.monotonic()` (simulated spans start at 0). bytes: what this rank handed
    over to be communicated; None where nothing was sent. lane: "compute", "link" or "input", the row of a
    timeline it belongs to. step: which training step, from 0; None outside of steps. detail: what a reader
    needs to tell it from its neighbours, such as "bucket 2".
    """

    rank: int
    name: str
    start: float
    end: float
    bytes: int | None = None
    lane: str = COMPUTE
    step: int | None = None
    detail: str = ""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start

    def to_row(self) -> list:
        """The span as a plain list, in field order, for JSON."""
        return list(dataclasses.astuple(self))


def from_rows(rows: Iterable[list]) -> list[Span]:
    """The spans that `Span.to_row` made lists of."""
    return [Span(*row) for row in rows]


def select(spans: Iterable[Span], **wanted: object) -> list[Span]:
    """The spans whose fields equal `wanted`, such as `select(run.spans, rank=0, name="forward")`."""
    return [s for s in spans if all(getattr(s, key) == value for key, value in wanted.items())]


_lock = threading.Lock()
_pending: list[Span] = []
_rank = 0


def set_rank(rank: int) -> None:
    """Say which rank this process is. The launcher calls it; elsewhere the rank is 0."""
    global _rank
    _rank = rank


def current_rank() -> int:
    """The rank that spans recorded in this process belong to."""
    return _rank


def record(span: Span) -> None:
    """Keep `span` until it is drained. Safe from any thread."""
    with _lock:
        _pending.append(span)


def drain() -> list[Span]:
    """All spans recorded since the last call."""
    global _pending
    with _lock:
        taken, _pending = _pending, []
    return taken


_step: int | None = None
_label = threading.local()


def set_step(step: int | None) -> None:
    """Say which training step this process is in: spans recorded from now on can belong to it."""
    global _step
    _step = step


def current_step() -> int | None:
    """The training step this process is in, as the probe last said; None outside of training."""
    return _step


@contextlib.contextmanager
def labelled(detail: str) -> Iterator[None]:
    """Name what this thread is about to communicate, such as "bucket 2", for whoever records it."""
    before = current_label()
    _label.detail = detail
    try:
        yield
    finally:
        _label.detail = before


def current_label() -> str:
    """What `labelled` named on this thread; empty where nothing is."""
    return getattr(_label, "detail", "")


def _wall_clock(waited: bool) -> float:
    return time.monotonic()


_time_source: Callable[[bool], float] = _wall_clock


def now(waited: bool = False) -> float:
    """The time that spans are recorded in: `time.monotonic()`, or a paced job's own time.

    waited: whether this thread has waited for all that it had sent; a paced job's time accounts for it then.
    """
    return _time_source(waited)


def set_time_source(source: Callable[[bool], float]) -> None:
    """Say where `now` takes the time from."""
    global _time_source
    _time_source = source


_links_record = False


def set_links_record_themselves(yes: bool) -> None:
    """Say that the process group records when each transfer was on the link, so that nobody else has to."""
    global _links_record
    _links_record = yes


def links_record_themselves() -> bool:
    """Whether the process group records its own transfers (the paced one does)."""
    return _links_record
