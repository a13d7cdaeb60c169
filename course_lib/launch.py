"""Run a function on several ranks, each a process of its own, from a notebook cell.

    run = launch(train, nproc=4)

This is the parent's side: check what was asked for, describe the job, run it, and turn what came back into
a `Run` or an error that names the cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from course_lib import request
from course_lib.failures import (
    JobError,
    JobInterrupted,
    JobTimeout,
    RankError,
    RankFailure,
    primary,
)
from course_lib.forkserver import ServerDied
from course_lib.job import Job
from course_lib.pace import Pace, board_bytes, verdict
from course_lib.progress import Progress
from course_lib.report import rank_report, stall_report
from course_lib.results import CannotReturn, unpack
from course_lib.run import Logs, NoResult, Run
from course_lib.travel import LARGE_BYTES, pack_call

DEFAULT_TIMEOUT = 60.0

_last: Run | None = None


def last_run() -> Run | None:
    """The `Run` of the latest job, also when it failed or was interrupted."""
    return _last


def launch(
    fn: Callable,
    nproc: int = 2,
    *,
    args: tuple = (),
    kwargs: dict | None = None,
    backend: str | None = "auto",
    pace: Pace | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    check: bool = True,
    progress: bool = True,
    **unknown: Any,
) -> Run:
    """Run `fn(*args, **kwargs)` on `nproc` ranks and return what they gave.

    fn: any function, also one defined in a cell; it travels by value, with the variables it uses. In each
    rank RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set and the process group exists.
    nproc: how many ranks. backend: "auto" (NCCL with one GPU a rank where there are enough, gloo
    elsewhere), "gloo", "nccl", or None to leave `init_process_group()` to `fn`. pace: the link that the
    ranks are given; `Pace()` only counts what they send. timeout: seconds for the whole job, counted from
    the moment the ranks start. check: False returns a failure in `run.failure` instead of raising it.
    progress: False shows no progress line.

    Raises RankError when a rank fails, JobTimeout when the job does not end in time, JobInterrupted when
    you stop it; each holds what was obtained in `.run`. Raises TypeError or ValueError, before anything
    starts, for a request that makes no sense.
    """
    global _last
    began = time.monotonic()
    if unknown:
        raise TypeError(request.explain_unknown(fn, unknown))
    kwargs = {} if kwargs is None else kwargs
    request.check(fn, nproc, args, kwargs, pace, timeout)
    chosen, gpus = request.choose_backend(nproc, backend, pace)
    payload = pack_call(fn, tuple(args), kwargs)
    name = getattr(fn, "__name__", type(fn).__name__)
    job = Job(
        payload,
        request.describe(nproc, chosen, gpus, pace, payload),
        board_bytes(nproc),
        Progress(progress),
    )
    job.run(float(timeout))
    run = _collect(job, name, chosen, pace, time.monotonic() - began)
    if len(payload) > LARGE_BYTES:
        run.warnings.append(request.large_payload(payload, fn, tuple(args), kwargs))
    _last = run
    run.failure = _failure(job, run, float(timeout))
    if run.failure is not None and (check or isinstance(run.failure, KeyboardInterrupt)):
        raise run.failure
    return run


def _collect(job: Job, name: str, backend: str | None, pace: Pace | None, seconds: float) -> Run:
    """What the ranks gave, as a Run."""
    results: list[Any] = []
    for rank, state in enumerate(job.ranks):
        if state.result is not None:
            try:
                results.append(unpack(state.result))
                continue
            except CannotReturn as error:
                state.failure = RankFailure(
                    rank, "result", "CannotReturn", str(error), "result", time.monotonic()
                )
        if state.failure is not None:
            reason = state.failure.text.strip().splitlines()[-1][:120]
        else:
            reason = "stopped before it returned"
        results.append(NoResult(rank, reason))
    spans = sorted(job.spans, key=lambda span: span.start)
    told = [state.pace_report for state in job.ranks if state.pace_report]
    reports = [report for report in told if "traffic" in report]
    paced = (pace is not None and pace.holds_back) or any(report["paced_compute"] for report in told)
    run = Run(
        name=name,
        nproc=len(job.ranks),
        backend=backend,
        kind="paced" if paced else "measured",
        results=results,
        logs=Logs([state.log.text() for state in job.ranks]),
        spans=spans,
        seconds=seconds,
        traffic=[report["traffic"] for report in reports],
    )
    warning = verdict(reports) if reports else None
    if warning:
        run.warnings.append(warning)
    if job.killed_in_teardown:
        run.warnings.append("the ranks had returned, but did not end by themselves and were stopped")
    return run


def _failure(job: Job, run: Run, timeout: float) -> BaseException | None:
    """The exception that tells what went wrong, or None."""
    if job.interrupted:
        counts = f"{len(run.spans)} spans" if run.spans else "no spans"
        return JobInterrupted(
            f"{run.name} was stopped after {run.seconds:.1f} s. Its {counts} and its logs are in last_run().",
            run,
        )
    failures = [state.failure for state in job.ranks if state.failure is not None]
    if job.timed_out or (failures and primary(failures).timed_out):
        return JobTimeout(stall_report(job, run.name, timeout), run)
    if failures:
        return RankError(rank_report(job, primary(failures)), run)
    if any(state.result is None for state in job.ranks):
        return JobError(
            "the process that starts ranks was killed, and the ranks with it. "
            "Launch again: a new one is started.",
            run,
        )
    return None


__all__ = ["JobError", "JobInterrupted", "JobTimeout", "RankError", "ServerDied", "last_run", "launch"]
