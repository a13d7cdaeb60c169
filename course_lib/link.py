"""One rank's link, and what each collective costs on it.

Each rank has one full-duplex link of some bandwidth B (bytes a second) and latency a (seconds). What it sends
queues on its egress, what it receives on its ingress. A message of m bytes that starts at t leaves its sender
free at t + m/B; its receiver takes it in at the first m/B seconds after t + a in which its ingress is free.
(With an idle receiver that is t + a + m/B.) The network in between keeps what has not been taken yet, so a
receiver that asks late gets it at once. The times are logical, see `clock`.

A collective starts when the last of the ranks that it needs has come to it and lasts as long as its algorithm
takes on such links; `plan` says how long, and what each rank sends. Sources: Patarasuk and Yuan 2009 for the
ring; Thakur, Rabenseifner and Gropp 2005 for the trees and for dissemination.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

KEPT_INTERVALS = 1024


class Link:
    """This rank's link: when its egress and its ingress are taken. Safe from any thread.

    bytes_per_second: math.inf for no limit. latency: seconds.
    """

    def __init__(self, bytes_per_second: float = math.inf, latency: float = 0.0) -> None:
        self.bytes_per_second = bytes_per_second
        self.latency = latency
        self._lock = threading.Lock()
        self._egress_free = 0.0
        self._forgotten = 0.0
        self._taken: list[tuple[float, float]] = []

    @property
    def holds_back(self) -> bool:
        """Whether anything takes longer on this link than without it."""
        return self.latency > 0 or math.isfinite(self.bytes_per_second)

    def seconds(self, size: float) -> float:
        """How long `size` bytes occupy the link."""
        return size / self.bytes_per_second

    def free_at(self) -> float:
        """When egress and ingress have nothing more to do, as far as is known."""
        with self._lock:
            return max(self._egress_free, self._taken[-1][1] if self._taken else 0.0)

    def send(self, now: float, size: int) -> tuple[float, float]:
        """Queue a message on the egress; when it starts and when it has left."""
        with self._lock:
            start = max(now, self._egress_free)
            self._egress_free = start + self.seconds(size)
            return start, self._egress_free

    def receive(self, sent: float, size: int) -> tuple[float, float]:
        """Take in a message that started on its sender's egress at `sent`: when this starts and ends.

        It takes the first gap that is long enough, so that the order in which a rank waits for its messages
        does not matter much.
        """
        with self._lock:
            start, length = max(sent + self.latency, self._forgotten), self.seconds(size)
            for begin, end in self._taken[self._first_ending_after(start) :]:
                if begin - start >= length:
                    break
                start = max(start, end)
            self._take(start, start + length)
            return start, start + length

    def occupy(self, start: float, end: float) -> None:
        """Mark both directions as taken, by a collective."""
        with self._lock:
            self._egress_free = max(self._egress_free, end)
            self._take(start, end)

    def _first_ending_after(self, when: float) -> int:
        return bisect.bisect_right(self._taken, when, key=lambda interval: interval[1])

    def _take(self, start: float, end: float) -> None:
        """Add an interval, joined with those it touches; forget the oldest."""
        if end <= start:
            return
        first = bisect.bisect_left(self._taken, start - 1e-9, key=lambda interval: interval[1])
        last = first
        while last < len(self._taken) and self._taken[last][0] <= end + 1e-9:
            start, end = min(start, self._taken[last][0]), max(end, self._taken[last][1])
            last += 1
        self._taken[first:last] = [(start, end)]
        if len(self._taken) > KEPT_INTERVALS:
            self._forgotten = self._taken.pop(0)[1]


@dataclass(frozen=True)
class Plan:
    """What one collective asks of one rank.

    needs: the ranks that must have come before it starts for this rank. rounds: how often the latency is
    paid. wire_bytes: the bytes that pass this rank's link one after the other. messages, bytes_sent,
    bytes_received: what this rank sends and receives. hub: for the root of a gather, the bytes of each
    message; 0 elsewhere.
    """

    needs: tuple[int, ...]
    rounds: int
    wire_bytes: float
    messages: int
    bytes_sent: float
    bytes_received: float
    hub: float = 0.0

    def finish(self, came: Mapping[int, float], rank: int, link: Link) -> tuple[float, float]:
        """When it starts and ends for `rank`, given when the ranks it needs came (logical seconds)."""
        if self.hub:
            return self._finish_gather(came, rank, link)
        start = max(came[needed] for needed in self.needs)
        return start, start + self.rounds * link.latency + link.seconds(self.wire_bytes)

    def _finish_gather(self, came: Mapping[int, float], rank: int, link: Link) -> tuple[float, float]:
        """The root takes in each sender's message in the order in which they arrive."""
        free = came[rank]
        for sent in sorted(came[sender] for sender in self.needs if sender != rank):
            free = max(free, sent + link.latency) + link.seconds(self.hub)
        return came[rank], free


def plan(collective: str, size: int, rank: int, world_size: int, root: int = 0) -> Plan:
    """The plan of `collective` for `rank` of `world_size`.

    size is S, in bytes: the whole vector for all_reduce, broadcast and reduce; the whole input of one rank
    for reduce_scatter and all_to_all; the whole output for all_gather; one rank's part for gather and
    scatter. With n ranks, latency a and bandwidth B they last:

    - all_reduce, a ring: 2(n-1) a + 2(n-1)/n S/B
    - reduce_scatter, all_gather, a ring each: (n-1) a + (n-1)/n S/B
    - all_to_all, pairwise: (n-1) a + (n-1)/n S/B
    - broadcast, reduce, a pipelined tree: ceil(log2 n) a + S/B where the data ends up (each receiver of a
      broadcast, the root of a reduce); the others are free once they have sent, after S/B
    - gather: each sender S/B; the root takes the messages in one after the other: a + (n-1) S/B
    - scatter: the root sends one after the other, (n-1) S/B; the k-th receiver has its part after a + k S/B
    - barrier, dissemination: ceil(log2 n) a
    """
    n, everyone = world_size, tuple(range(world_size))
    if n == 1:
        return Plan(everyone, 0, 0.0, 0, 0.0, 0.0)
    part = (n - 1) / n * size
    tree = math.ceil(math.log2(n))
    is_root = rank == root
    if collective == "all_reduce":
        return Plan(everyone, 2 * (n - 1), 2 * part, 2 * (n - 1), 2 * part, 2 * part)
    if collective in ("reduce_scatter", "all_gather", "all_to_all"):
        return Plan(everyone, n - 1, part, n - 1, part, part)
    if collective == "barrier":
        return Plan(everyone, tree, 0.0, tree, 0.0, 0.0)
    if collective == "broadcast":
        last = (rank - root) % n == n - 1
        sent = (0, 0.0) if last else (1, float(size))
        if is_root:
            return Plan((rank,), 0, size, *sent, 0.0)
        return Plan((rank, root), tree, size, *sent, size)
    if collective == "reduce":
        first = (rank - root) % n == n - 1
        if is_root:
            return Plan(everyone, tree, size, 0, 0.0, size)
        return Plan((rank,), 0, size, 1, size, 0.0 if first else size)
    if collective == "gather":
        if is_root:
            return Plan(everyone, 1, (n - 1) * size, 0, 0.0, (n - 1) * size, hub=size)
        return Plan((rank,), 0, size, 1, size, 0.0)
    if collective == "scatter":
        if is_root:
            return Plan((rank,), 0, (n - 1) * size, n - 1, (n - 1) * size, 0.0)
        place = (rank - root) % n
        return Plan((rank, root), 1, place * size, 0, 0.0, size)
    raise ValueError(f"no plan for the collective {collective!r}")
