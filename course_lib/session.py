"""Ranks that stay alive between cells, for stepping through a collective or through DDP by hand.

    world = Ranks(nproc=4)
    %%ranks                     the cell runs on every rank; each keeps its variables for the next cell
    %%ranks 0,2                 … or on some
    world["x"]                  the variable x of each rank, by rank
    world["x"] = 3              gives every rank the variable x

The ranks know `torch`, `dist`, `rank` and `world_size` from the start, and their process group exists. The
same promises hold as for `launch`: they talk over loopback only, and whatever ends the notebook ends them.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import linecache
import os
import threading
import traceback
import weakref
from collections.abc import Iterable
from typing import Any

from course_lib import request, session_rank, wire
from course_lib.failures import JobError, JobInterrupted, JobTimeout, RankError, primary, wrap
from course_lib.pace import Pace, board_bytes, verdict
from course_lib.progress import Progress
from course_lib.results import CannotReturn, unpack
from course_lib.run import Logs, NoResult
from course_lib.session_job import ANSWERED, INTERRUPTED, TIMED_OUT, Orders, SessionJob
from course_lib.session_view import (
    KEPT,
    LEFT,
    LOST,
    REGROUPED,
    CellRun,
    error_report,
    interrupt_report,
    stall_report,
)
from course_lib.travel import pack_call

DEFAULT_TIMEOUT = 10.0
REGROUP_SECONDS = 5.0

_worlds: list[weakref.ref[Ranks]] = []
_numbers = itertools.count(1)


class CellError(ValueError):
    """A cell that cannot run on any rank: it is no Python."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Ranks:
    """Some ranks that stay, each a process of its own that keeps its variables from cell to cell.

    nproc: how many. pace: the link that each gets; `Pace()` only counts what they send. backend: as for
    `launch`; None leaves `init_process_group()` to you. timeout: seconds for a cell, then its ranks are
    stopped. Raises TypeError, ValueError or RuntimeError for a request that makes no sense.
    """

    def __init__(
        self,
        nproc: int = 4,
        *,
        pace: Pace | None = None,
        backend: str | None = "auto",
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self._job: SessionJob | None = None
        request.check(session_rank.serve, nproc, (), {}, pace, timeout, "Ranks")
        self.nproc, self.pace, self.timeout = nproc, pace, timeout
        self.backend, self._gpus = request.choose_backend(nproc, backend, pace)
        self.last: CellRun | None = None
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._groups = 0
        self._open()
        _worlds[:] = [ref for ref in _worlds if ref() is not None]
        _worlds.append(weakref.ref(self))
        from course_lib import magic

        magic.register()

    def run(
        self,
        source: str,
        ranks: Iterable[int] | int | None = None,
        *,
        timeout: float | None = None,
        check: bool = True,
        file: str | None = None,
    ) -> CellRun:
        """Run `source` on every rank, or on `ranks`, and return what they printed and their last expressions.

        timeout: seconds, if not those of the world. check: False returns a failure in `.failure` instead of
        raising it. file: what tracebacks call the source. Raises CellError where `source` is no Python,
        RankError when a rank fails, JobTimeout when the cell does not end in time, JobInterrupted when you
        stop it; each says what is left of the ranks' variables.
        """
        file = file or f"<cell {next(_numbers)} of the ranks>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        try:
            ast.parse(source, file)
        except SyntaxError as error:
            hint = "\nA %%ranks cell is plain Python: % and ! commands do not run on ranks."
            text = "".join(traceback.format_exception_only(error))
            raise CellError(text + (hint if (error.text or "").lstrip()[:1] in "%!" else "")) from None
        order = (wire.RUN, json.dumps({"source": source, "file": file}).encode())
        chosen = self._choose(ranks)
        run = self._ask(dict.fromkeys(chosen, order), self.timeout if timeout is None else timeout)
        run.results = [run.answers.get(rank, b"").decode(errors="replace") for rank in range(self.nproc)]
        self.last = run
        if run.failure is not None and (check or isinstance(run.failure, KeyboardInterrupt)):
            raise run.failure
        return run

    def push(self, **values: Any) -> None:
        """Give every rank variables with these values: push(x=3). They travel by value, as for `launch`."""
        order = (wire.TAKE, pack_call(session_rank.values, (), values))
        run = self._ask(dict.fromkeys(range(self.nproc), order), max(self.timeout, 60.0))
        if run.failure is not None:
            raise run.failure

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f'{name!r} is no name of a variable; write world["x"] = value')
        self.push(**{name: value})

    def __getitem__(self, expression: str) -> list[Any]:
        """What a variable, or any expression, is worth on each rank, by rank.

        A rank that cannot say gives a NoResult. Raises NameError, CannotReturn or RankError where none can.
        """
        if not isinstance(expression, str):
            raise TypeError(
                f'{expression!r} is no expression; write world["x"], and world["x"][0] for rank 0\'s'
            )
        order = (wire.SAY, expression.encode())
        return _values(self._ask(dict.fromkeys(range(self.nproc), order), self.timeout), expression)

    def restart(self) -> None:
        """Start the ranks anew: their variables are gone."""
        with self._lock:
            self._close_job()
            self._open()

    def close(self) -> None:
        """End the ranks. Doing it twice does no harm."""
        with self._lock:
            self._close_job()

    @property
    def closed(self) -> bool:
        """Whether the ranks have ended."""
        return self._job is None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._close_job()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "ready"
        pace = f" paced at {self.pace}" if self.pace is not None and self.pace.holds_back else ""
        return f"{self.nproc} ranks that stay, over {self.backend or 'no group yet'}{pace}: {state}"

    def _open(self) -> None:
        payload = pack_call(session_rank.serve, (), {})
        description = request.describe(self.nproc, self.backend, self._gpus, self.pace, payload)
        # Nobody knows yet what the cells will want: DDP is to be there.
        description["heavy"] = True
        job = SessionJob(payload, description, board_bytes(self.nproc), Progress(True))
        job.open()
        self._job = job

    def _close_job(self) -> None:
        job, self._job = self._job, None
        if job is not None and self._owner_pid == os.getpid():
            job.end()

    def _choose(self, ranks: Iterable[int] | int | None) -> list[int]:
        if ranks is None:
            return list(range(self.nproc))
        chosen = sorted({ranks} if isinstance(ranks, int) else set(ranks))
        for rank in chosen:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.nproc:
                raise ValueError(f"rank {rank!r} does not exist: there are ranks 0 to {self.nproc - 1}")
        if not chosen:
            raise ValueError("no rank was chosen; leave the ranks out to run on all")
        return chosen

    def _ask(self, orders: Orders, timeout: float) -> CellRun:
        """Exchange orders for answers, and leave the ranks usable, started anew if need be."""
        with self._lock:
            job = self._job
            if job is None or self._owner_pid != os.getpid():
                raise RuntimeError("these ranks have been closed; make new ones with Ranks(...)")
            how = job.exchange(orders, timeout)
            run = self._collect(job)
            failures = [state.failure for state in job.ranks if state.failure is not None]
            if how == ANSWERED and not failures:
                return run
            kind: type[RankError] | type[JobTimeout] | type[JobInterrupted] | type[JobError] = RankError
            if how == INTERRUPTED:
                kind, text = JobInterrupted, interrupt_report(job)
            elif how == TIMED_OUT or (failures and primary(failures).timed_out):
                kind, text = JobTimeout, stall_report(job, how, timeout)
            elif failures:
                text = error_report(job, primary(failures))
            else:
                kind, text = JobError, "the process that starts ranks was killed, and the ranks with it"
            run.aftermath = self._settle(job, how)
            run.failure = kind(f"{text}\n\n{wrap(run.aftermath)}", run)
            return run

    def _settle(self, job: SessionJob, how: str) -> str:
        """Make the ranks usable again after a failure; return what is left of them."""
        if how == TIMED_OUT or not job.back:
            self._job = None
            job.kill()
            self._open()
            return LOST
        calls = {job.calls(rank) for rank in job.asked}
        if not job.freed and len(calls) == 1:
            return KEPT
        self._groups += 1
        order = (wire.REGROUP if self.backend else wire.LEAVE, f"again{self._groups}".encode())
        if job.exchange(dict.fromkeys(range(self.nproc), order), REGROUP_SECONDS) == ANSWERED and not any(
            state.failure for state in job.ranks
        ):
            return REGROUPED if self.backend else LEFT
        return self._settle(job, TIMED_OUT)

    def _collect(self, job: SessionJob) -> CellRun:
        reports = [job.ranks[rank].pace_report or {} for rank in job.asked]
        paced = [report for report in reports if "pace" in report]
        computes_paced = any(report.get("paced_compute") for report in reports)
        holds_back = self.pace is not None and self.pace.holds_back
        run = CellRun(
            name="cell",
            nproc=self.nproc,
            backend=self.backend,
            kind="paced" if holds_back or computes_paced else "measured",
            results=[""] * self.nproc,
            logs=Logs([state.log.text() for state in job.ranks]),
            spans=sorted(job.spans, key=lambda span: span.start),
            seconds=max((report.get("time", 0.0) for report in reports), default=0.0),
            traffic=[report["traffic"] for report in paced],
            ranks=list(job.asked),
            answers={rank: state.result for rank, state in enumerate(job.ranks) if state.result is not None},
            failures={
                rank: state.failure for rank, state in enumerate(job.ranks) if state.failure is not None
            },
        )
        warning = verdict(paced) if paced else None
        if warning:
            run.warnings.append(warning)
        return run


def latest() -> Ranks | None:
    """The ranks that were made last and have not been closed; None where there are none."""
    worlds = [world for ref in _worlds if (world := ref()) is not None and not world.closed]
    return worlds[-1] if worlds else None


def _values(run: CellRun, expression: str) -> list[Any]:
    """What the ranks answered, or why a rank could not; raises where none could."""
    if run.failure is not None and len(run.answers) + len(run.failures) < run.nproc:
        raise run.failure
    if run.answers:
        return [
            unpack(run.answers[rank]) if rank in run.answers else NoResult(rank, run.failures[rank].text)
            for rank in range(run.nproc)
        ]
    first = run.failures[0]
    if first.type == "CannotReturn":
        raise CannotReturn(first.text.replace(": return ", ": ask for "))
    if first.type == "NameError" and len(first.frames) <= 3:
        raise NameError(f"no rank has a variable for {expression!r} ({first.text})")
    assert run.failure is not None
    raise run.failure
