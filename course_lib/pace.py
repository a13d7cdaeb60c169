"""`Pace`: the link of a paced job, in gigabits a second and microseconds.

A paced job runs on the backend "paced": every message is carried for real, over gloo, and completes no sooner
than a link of that bandwidth and latency would have it. Each rank has one such link, full-duplex. `Pace()`
holds nothing back and only counts what is sent. This module is light; torch comes in with `install`.

A machine keeps a pace as long as its real transfers are quicker than the paced ones. Measured on 2 cores with
nothing else running, measured time over formula (`verdict` noticed the others, from 1.02 up):

- all_reduce within 3 % where the formula gives at least 8 ms on 2 ranks, 12 ms on 4, 30 ms on 8. So 1 MB on
  4 ranks up to 1 Gbit/s; 0.25 MB up to 0.2; 4 and 16 MB on 8 ranks up to 2. Past 2 Gbit/s it depends: 16 MB
  took 1.01 of its formula at 5 Gbit/s on 4 ranks, 1.45 on 8.
- A ring by send and recv within 5 % where each of its 2(n-1) steps takes at least 5 ms on 4 ranks, 8 ms on
  8: 1 MB on 4 ranks up to 0.5 Gbit/s, 4 MB on 8 ranks up to 0.5.
- Beyond that, times are upper bounds: 0.25 MB on 8 ranks at 1 Gbit/s took 6 times its formula, 13 by hand.

Latencies below about 0.3 ms show only in sums, since waking up takes 0.1 to 0.2 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from course_lib.board import board_bytes
from course_lib.ledger import pace_warning

__all__ = ["Pace", "board_bytes", "install", "report", "verdict"]

MOST_GBPS = 1000.0
MOST_LATENCY_US = 10_000_000.0


@dataclass(frozen=True)
class Pace:
    """The link that each rank of a job gets.

    gbps: gigabits (10^9 bits) a second, above 0 and up to 1000; None for no limit. latency_us: microseconds
    from a message's start at its sender to its start at its receiver, 0 to 10,000,000. Raises TypeError and
    ValueError for anything else.
    """

    gbps: float | None = None
    latency_us: float = 0.0

    def __post_init__(self) -> None:
        if self.gbps is not None:
            _check_number("gbps", self.gbps, "a number such as 1 or 0.1, or None for no limit")
            if not 0 < self.gbps <= MOST_GBPS:
                raise ValueError(
                    f"gbps={self.gbps!r}: a link's bandwidth is above 0 and at most {MOST_GBPS:g} Gbit/s; "
                    "leave it out for no limit"
                )
        _check_number("latency_us", self.latency_us, "a number such as 50")
        if not 0 <= self.latency_us <= MOST_LATENCY_US:
            raise ValueError(
                f"latency_us={self.latency_us!r}: a latency is from 0 to {MOST_LATENCY_US:,.0f} microseconds"
            )

    @property
    def holds_back(self) -> bool:
        """Whether anything takes longer with this pace than without; if not, it only counts."""
        return self.gbps is not None or self.latency_us > 0

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth in bytes a second; infinite where there is no limit."""
        return math.inf if self.gbps is None else self.gbps * 1e9 / 8

    @property
    def latency(self) -> float:
        """The latency in seconds."""
        return self.latency_us * 1e-6

    def seconds(self, size: float) -> float:
        """How long `size` bytes occupy the link, without the latency."""
        return size / self.bytes_per_second

    def to_dict(self) -> dict[str, float | None]:
        """The pace as JSON can carry it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Pace:
        """The pace that `to_dict` gave."""
        return cls(**fields)

    def __str__(self) -> str:
        bandwidth = "no limit" if self.gbps is None else f"{self.gbps:g} Gbit/s"
        return f"{bandwidth}, {self.latency_us:g} µs" if self.latency_us else bandwidth


def _check_number(name: str, value: Any, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is not {allowed}")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not {allowed}")


_installed: Pace | None = None


def install(pace: Pace, record_spans: bool | None = None) -> None:
    """In a rank: make the backend "paced" known, with this pace. Again with the same pace does nothing.

    record_spans: whether each transfer is recorded as a span; None for where the pace holds back.
    """
    global _installed
    if not isinstance(pace, Pace):
        raise TypeError(f"pace={pace!r} is not a Pace; pass one, such as Pace(gbps=1, latency_us=50)")
    if pace == _installed:
        return
    from course_lib import paced_backend

    paced_backend.register(pace.bytes_per_second, pace.latency, record_spans)
    _installed = pace


def installed() -> Pace | None:
    """The pace this rank runs at; None where none is installed."""
    return _installed


def report() -> dict[str, Any]:
    """In a rank: {"traffic": by collective, "pace": how it was kept}, as JSON can carry it.

    traffic[name] has calls, payload_bytes (handed over), messages, bytes_sent and bytes_received (on this
    rank's link, by the algorithm that is assumed). pace is what `verdict` reads.
    """
    from course_lib import paced_backend

    return paced_backend.report()


def verdict(reports: Sequence[Mapping[str, Any]]) -> str | None:
    """What the reports of a job's ranks say about the pace: None where it was kept, else a sentence."""
    return pace_warning(reports) or None
