"""The ledger of a paced rank: what it sent, by collective, and whether the machine kept the pace."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from course_lib import clock

LATE_SHARE = 0.02
LATE_SECONDS = 0.002
FORGIVEN_SECONDS = 0.001


class Ledger:
    """Counts of one rank. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: dict[str, dict[str, float]] = {}
        self._paced = 0
        self._late = 0
        self._worst = 0.0
        self._lateness = 0.0
        self._paced_seconds = 0.0
        self._without_stamps = 0

    def count(self, name: str, payload: int, messages: int, sent: float, received: float) -> None:
        """Note one call: the bytes handed over, and the messages and bytes of this rank's link."""
        with self._lock:
            row = self._operations.setdefault(
                name,
                {"calls": 0, "payload_bytes": 0, "messages": 0, "bytes_sent": 0.0, "bytes_received": 0.0},
            )
            row["calls"] += 1
            row["payload_bytes"] += payload
            row["messages"] += messages
            row["bytes_sent"] += sent
            row["bytes_received"] += received

    def note_pace(self, seconds: float, lateness: float) -> None:
        """Note one paced transfer: how long it should take, and by how much the real one outlasted that."""
        with self._lock:
            self._paced += 1
            self._paced_seconds += seconds
            # What a wake-up takes is not the transfer's fault, and is caught up.
            if lateness > FORGIVEN_SECONDS:
                self._late += 1
                self._lateness += lateness
                self._worst = max(self._worst, lateness)

    def note_missing_stamp(self) -> None:
        """Note a collective that started when this rank came, since the others' stamps were gone."""
        with self._lock:
            self._without_stamps += 1

    def report(self) -> dict[str, Any]:
        """All of it, as JSON can carry it."""
        with self._lock:
            operations = {name: dict(row) for name, row in self._operations.items()}
            for row in operations.values():
                # Shares such as 2(n-1)/n are exact only in sum, up to rounding.
                row["bytes_sent"], row["bytes_received"] = (
                    round(row["bytes_sent"]),
                    round(row["bytes_received"]),
                )
            pace = {
                "transfers": self._paced,
                "late": self._late,
                "worst_lateness_seconds": self._worst,
                "lateness_seconds": self._lateness,
                "paced_seconds": self._paced_seconds,
                "without_stamps": self._without_stamps,
                **clock.behind(),
            }
        return {"traffic": operations, "pace": pace}


def kept_pace(reports: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the machine kept the pace on all ranks, so that measured times are the paced ones."""
    return not any(_too_late(report["pace"]) for report in reports)


def pace_warning(reports: Sequence[Mapping[str, Any]]) -> str:
    """A sentence that says how the machine did not keep the pace; empty where it did."""
    late = [report["pace"] for report in reports if _too_late(report["pace"])]
    if not late:
        return ""
    transfers = sum(report["pace"]["transfers"] for report in reports)
    number = sum(report["pace"]["late"] for report in reports)
    behind = max(pace["behind_seconds"] for pace in late)
    worst = max(report["pace"]["worst_lateness_seconds"] for report in reports)
    said = f"the machine could not keep this pace: {number} of {transfers} transfers finished late"
    if number:
        said += f", the worst by {worst * 1e3:.1f} ms"
    if behind > LATE_SECONDS:
        said += f"; the slowest rank fell {behind * 1e3:.0f} ms behind"
    return said + "; times are upper bounds"


def _too_late(pace: Mapping[str, Any]) -> bool:
    late = max(pace["lateness_seconds"], pace["behind_seconds"])
    paced = pace["paced_seconds"] + pace["slept_seconds"]
    return late > max(LATE_SHARE * paced, LATE_SECONDS)
