"""The job behind ranks that stay: started once, then given one order after another.

`exchange` sends orders and waits for the answers. Where ranks wait for one that has failed, the failed ones
leave the process group: that closes their connections, which ends the others' wait with an error, and so all
ranks come back with their variables.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping

from course_lib import wire
from course_lib.failures import JobError, primary
from course_lib.job import STACK_SECONDS, START_SECONDS, Job
from course_lib.progress import Progress
from course_lib.rank_state import RankState
from course_lib.report import rank_report
from course_lib.run import Logs, Run
from course_lib.stacks import Standing

LOOK_SECONDS = 0.5
FREE_SECONDS = 3.0
INTERRUPT_SECONDS = 1.0
SEND_SECONDS = 10.0
END_SECONDS = 1.0
# How an exchange ended: every rank answered, be it with an error; some waited for one that had failed; time
# was up; a rank's process ended; you interrupted it.
ANSWERED, STUCK, TIMED_OUT, DIED, INTERRUPTED = "answered", "stuck", "timed out", "died", "interrupted"

Orders = Mapping[int, tuple[bytes, bytes]]


class SessionJob(Job):
    """A job whose ranks take orders. After each exchange, `ranks` holds what every rank said.

    standings: where the ranks stood that did not answer, when an exchange had to be ended. freed: whether
    ranks had to leave the process group, so that it can be used no more.
    """

    def open(self) -> None:
        """Start the ranks and wait until they take orders. Raises ServerDied, JobError, KeyboardInterrupt."""
        try:
            self._start()
            self._wait_until_started()
            deadline = time.monotonic() + START_SECONDS
            while not all(state.stage == "running" for state in self.ranks):
                failures = [state.failure for state in self.ranks if state.failure is not None]
                if failures or self.clean or time.monotonic() > deadline:
                    text = rank_report(self, primary(failures)) if failures else self._last_words()
                    raise JobError(text, _empty_run(len(self.ranks)))
                self._pump(deadline, "starting")
        except BaseException:
            self.kill()
            raise
        self.progress.close()

    def exchange(self, orders: Orders, timeout: float, progress: bool = True) -> str:
        """Give each of these ranks its order, wait for what they answer, and say how that ended."""
        self.asked = sorted(orders)
        self.standings: dict[int, Standing | None] = {}
        self.freed = False
        for state in self.ranks:
            state.start_over()
        self.spans = []
        self.started_at = time.monotonic()
        self.progress = Progress(progress)
        try:
            self._pump(0, "running")
            # Ranks that died since the last exchange: then nobody is asked anything.
            self.asked = [] if self.lost else self.asked
            for rank in self.asked:
                self._send(rank, *orders[rank])
            how = self._wait(self.started_at + timeout)
        except KeyboardInterrupt:
            how = self._interrupt()
        finally:
            self.progress.close()
        self._read_output()
        return how

    @property
    def waiting(self) -> list[RankState]:
        """The ranks that have an order and have not answered."""
        return [state for rank, state in enumerate(self.ranks) if rank in self.asked and not state.reported]

    @property
    def lost(self) -> bool:
        """Whether a rank's process has ended."""
        return self.clean or any(state.exited for state in self.ranks)

    @property
    def back(self) -> bool:
        """Whether every rank is ready for the next order."""
        return not self.lost and not self.waiting

    def calls(self, rank: int) -> int | None:
        """How many collective calls the rank made in this exchange; None where it cannot know."""
        return (self.ranks[rank].pace_report or {}).get("collectives")

    def _send(self, rank: int, kind: bytes, body: bytes = b"") -> None:
        channel = self.channels[rank]
        channel.settimeout(SEND_SECONDS)
        with contextlib.suppress(OSError):
            channel.sendall(wire.HEADER.pack(kind, len(body)))
            channel.sendall(body)
        channel.setblocking(False)

    def _wait(self, deadline: float) -> str:
        next_look = 0.0
        seen: object = None
        while self.waiting:
            now = time.monotonic()
            if self.lost:
                self._pump_for(LOOK_SECONDS, lambda: not self.waiting)
                self._look()
                return DIED
            if now >= deadline:
                self._look()
                return TIMED_OUT
            if not any(state.failure for state in self.ranks):
                self._pump(deadline, "running")
                continue
            next_look = next_look or now + LOOK_SECONDS
            if now >= next_look:
                places = self._look()
                if None not in places and places == seen:
                    return self._free()
                seen, next_look = places, time.monotonic() + LOOK_SECONDS
            self._pump(min(deadline, next_look), "running")
        return DIED if self.lost else ANSWERED

    def _look(self) -> list:
        """Ask the ranks that have not answered where they stand; None for one that waits for no other."""
        waiting = self.waiting
        for state in waiting:
            state.dump.clear()
        self._order(b"d")
        self._pump_for(STACK_SECONDS, lambda: all(s.standing or s.exited or s.reported for s in waiting))
        for state in waiting:
            if not state.reported:
                self.standings[state.rank] = state.standing
        places = [state.standing for state in waiting if not state.reported]
        # DDP waits inside backward, in compiled code.
        return [p.frames if p is not None and (p.collective or p.backward) else None for p in places]

    def _free(self) -> str:
        """Have the ranks that are back leave the process group, so that those that wait for them fail."""
        free: set[int] = set()
        self.freed = True
        deadline = time.monotonic() + FREE_SECONDS
        while self.waiting and time.monotonic() < deadline and not self.lost:
            for state in self.ranks:
                if state not in self.waiting and state.rank not in free:
                    free.add(state.rank)
                    self._send(state.rank, wire.LEAVE)
            self._pump(deadline, "stopping")
        return STUCK

    def _interrupt(self) -> str:
        """Interrupt what the ranks run; a second interrupt stops waiting for them."""
        with contextlib.suppress(KeyboardInterrupt):
            self._look()
            self._order(b"i")
            self._pump_for(INTERRUPT_SECONDS, lambda: not self.waiting or self.lost)
            if self.waiting and len(self.waiting) < len(self.asked):
                self._free()
        return INTERRUPTED

    def _read_output(self) -> None:
        """Take what the ranks printed before they answered: it is in their pipes by now."""
        for key in list(self.selector.get_map().values()):
            source, rank = key.data
            if source == "output":
                # One reading empties a pipe; a second might follow what a thread prints without end.
                with contextlib.suppress(OSError):
                    self.ranks[rank].log.feed(os.read(key.fd, 1 << 20))

    def end(self) -> None:
        """Let the ranks end by themselves, in good order, and leave nothing."""
        try:
            for state in self.ranks:
                state.start_over()
                self._send(state.rank, wire.END)
            self._pump_for(END_SECONDS, lambda: all(state.reported for state in self.ranks) or self.lost)
            self._bring_to_an_end()
        finally:
            self._close()

    def kill(self) -> None:
        """Kill the ranks and leave nothing."""
        try:
            self._kill()
        finally:
            self._close()


def _empty_run(nproc: int) -> Run:
    return Run("Ranks", nproc, None, "measured", [], Logs([""] * nproc), [], 0.0)
