"""The queue of a paced group: one thread that carries its collectives, in order, and knows when each is due.

At the head of the queue a rank leaves its stamp on the board, lets gloo do the transfer, reads the stamps of
the others, and so knows when the paced transfer starts and ends. It then carries the next one at once: real
transfers run ahead of paced ones, and a slow moment of the machine does not show unless it outlasts them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from course_lib.board import Stamp, group_key
from course_lib.link import Plan
from course_lib.paced_rank import PacedRank
from course_lib.paced_work import PacedWork

# The ranks of a barrier leave it together: this many times what the machine needed to get all through after
# the last had come, and no sooner than that many seconds.
LINE_UP = 3.0
LINE_UP_SECONDS = 0.002


@dataclass
class Collective:
    """One collective on its way. came: when this rank issued it, in logical seconds. payload: bytes."""

    name: str
    payload: int
    plan: Plan
    came: float
    run: Callable[[], dist.Work]
    work: PacedWork
    detail: str = ""
    step: int | None = None


class CollectiveQueue:
    """The collectives of one group on one rank. inner: the gloo group, for stamps where there is no board."""

    def __init__(
        self, name: str, inner: dist.ProcessGroup, shared: PacedRank, rank: int, ranks: list[int]
    ) -> None:
        self._name, self._inner, self._shared = name, inner, shared
        self._rank, self._ranks = rank, ranks
        self._key = group_key(name, ranks)
        self._number = 0
        self._waiting: queue.SimpleQueue[Collective | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, collective: Collective) -> None:
        """Queue a collective."""
        self._waiting.put(collective)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"paced group {self._name}", daemon=True)
            self._thread.start()

    def close(self, patience: float, abort: Callable[[], None]) -> None:
        """End the thread: after what is queued, or by `abort` where that takes over `patience` seconds."""
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return
        self._waiting.put(None)
        thread.join(patience)
        if thread.is_alive():
            abort()
            thread.join(1.0)

    def _run(self) -> None:
        with torch.no_grad():
            while (collective := self._waiting.get()) is not None:
                try:
                    collective.work.carried(self._carry(collective))
                except Exception as error:
                    collective.work.failed(error)
                # The tensors of a collective that everyone else is done with are not to live on here.
                del collective

    def _carry(self, collective: Collective) -> float:
        """Do one collective for real; when it is due."""
        link, plan = self._shared.link, collective.plan
        stamp = Stamp(max(collective.came, link.free_at()), time.monotonic())
        self._number += 1
        exchanged = self._leave(stamp)
        collective.run().wait()
        done = time.monotonic()
        stamps = {rank: self._find(rank, stamp, exchanged) for rank in plan.needs}
        start, due = plan.finish({rank: each.logical for rank, each in stamps.items()}, self._rank, link)
        really_began = max(each.real for each in stamps.values())
        if collective.name == "barrier":
            line_up = max(LINE_UP_SECONDS, LINE_UP * self._longest(collective, done - really_began))
            due = max(due, really_began + line_up)
        else:
            link.occupy(start, due)
            self._shared.ledger.note_pace(due - start, done - (max(start, really_began) + due - start))
        self._shared.record(
            collective.name, start, due, collective.payload, collective.detail, collective.step
        )
        return due

    def _longest(self, barrier: Collective, took: float) -> float:
        """How long any rank really took to get through a barrier, which a second one lets all of them know.

        People start their stopwatch after a barrier. So its ranks must leave it together, at a time that all
        know and that none has missed.
        """
        self._number += 1
        mine = Stamp(took, took)
        exchanged = self._leave(mine)
        barrier.run().wait()
        return max(self._find(rank, mine, exchanged).real for rank in barrier.plan.needs)

    def _leave(self, stamp: Stamp) -> list[Stamp]:
        """Leave this rank's stamp; without a board, exchange stamps with the others and return them all."""
        if self._shared.board is not None:
            self._shared.board.write(self._key, self._number, stamp)
            return []
        everyones = torch.empty(len(self._ranks), 2, dtype=torch.float64)
        mine = torch.tensor([list(stamp)], dtype=torch.float64)
        self._inner.all_gather_single(everyones, mine, AllgatherOptions()).wait()
        return [Stamp(*row) for row in everyones.tolist()]

    def _find(self, rank: int, own: Stamp, exchanged: list[Stamp]) -> Stamp:
        """The stamp of one of the group's ranks."""
        if rank == self._rank:
            return own
        if self._shared.board is None:
            return exchanged[rank]
        found = self._shared.board.read(self._ranks[rank], self._key, self._number)
        if found is None:
            self._shared.ledger.note_missing_stamp()
            return own
        return found
