"""Run a function on several ranks, each a process of its own, from a notebook cell.

    run = launch(train, nproc=4)

This is the parent's side: check what was asked for, describe the job, run it, and turn what came back into
a `Run` or an error that names the cause.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from course_lib import machine
from course_lib.failures import (
    JobError,
    JobInterrupted,
    JobTimeout,
    RankError,
    RankFailure,
    format_failure,
    one_line,
    primary,
)
from course_lib.forkserver import ServerDied
from course_lib.job import Job
from course_lib.pace import Pace, board_bytes, verdict
from course_lib.progress import Progress
from course_lib.rank import INSIDE_A_RANK
from course_lib.results import CannotReturn, unpack
from course_lib.run import Logs, NoResult, Run
from course_lib.stacks import Standing
from course_lib.stall import advise, describe_rank
from course_lib.travel import LARGE_BYTES, large_variables, pack_call

# What a rank must not inherit: another job's coordinates, another scheduler's, and this kernel's own
# (examples#458, distrifuser#11).
SCRUBBED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MPLBACKEND",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
SCRUBBED_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "TORCH_DIST_INIT", "JPY_", "GLOO_")
# What makes a call worth importing more for in the server: without it, every rank would by itself.
HEAVY_MARKERS = (b"DistributedDataParallel", b"DDP", b"fully_shard", b"ZeroRedundancy")
MAX_TIMEOUT = 24 * 3600.0
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
    kwargs = {} if kwargs is None else kwargs
    _check_request(fn, nproc, args, kwargs, pace, timeout)
    gpus = _gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    chosen = None if backend is None else machine.choose_backend(nproc, backend, gpus)
    if pace is not None and chosen == "nccl":
        if backend == "nccl":
            raise ValueError(
                'a paced job runs over gloo on CPUs: leave backend at "auto" or pass backend="gloo"'
            )
        chosen = "gloo"
    payload = pack_call(fn, tuple(args), kwargs)
    name = getattr(fn, "__name__", type(fn).__name__)
    job = Job(
        payload,
        _describe(nproc, chosen, gpus, pace, payload),
        board_bytes(nproc),
        Progress(progress),
    )
    job.run(float(timeout))
    run = _collect(job, name, chosen, pace, time.monotonic() - began)
    if len(payload) > LARGE_BYTES:
        run.warnings.append(_large_payload(payload, fn, tuple(args), kwargs))
    _last = run
    run.failure = _failure(job, run, float(timeout))
    if run.failure is not None and (check or isinstance(run.failure, KeyboardInterrupt)):
        raise run.failure
    return run


@functools.lru_cache(maxsize=8)
def _gpus(visible_devices: str | None) -> int:
    """How many GPUs this process may use; looked up once for each CUDA_VISIBLE_DEVICES."""
    return len(machine.inspect().gpus)


def _check_request(fn: Any, nproc: Any, args: Any, kwargs: Any, pace: Any, timeout: Any) -> None:
    if os.environ.get(INSIDE_A_RANK):
        raise RuntimeError(
            f"launch was called inside rank {os.environ[INSIDE_A_RANK]} of a running job. "
            "Call it from the notebook: a rank cannot start ranks of its own."
        )
    if not callable(fn):
        raise TypeError(f"launch needs a function to run, and was given {fn!r}: pass `train`, not `train()`")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise TypeError(
            f"{fn.__name__} is a generator or async function; launch runs ordinary functions only"
        )
    if isinstance(nproc, bool) or not isinstance(nproc, int):
        raise TypeError(f"nproc={nproc!r} is not a whole number of ranks; pass an int, such as nproc=4")
    if nproc < 1:
        raise ValueError(f"nproc={nproc} ranks cannot run; pass 1 or more")
    if nproc > 8 and nproc > machine.max_ranks():
        raise ValueError(f"nproc={nproc} is more than this machine can carry. {machine.explain_max_ranks()}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args={args!r} must be a tuple, such as args=(20,)")
    if not isinstance(kwargs, dict):
        raise TypeError(f'kwargs={kwargs!r} must be a dict, such as kwargs={{"steps": 20}}')
    if pace is not None and not isinstance(pace, Pace):
        raise TypeError(f"pace={pace!r} is not a Pace; pass one, such as Pace(gbps=1, latency_us=50)")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout={timeout!r} is not a number of seconds")
    if not 0 < timeout <= MAX_TIMEOUT:
        raise ValueError(f"timeout={timeout} must be more than 0 and at most {MAX_TIMEOUT:.0f} seconds")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RuntimeError(
            "this notebook's working directory no longer exists; os.chdir() to one that does"
        ) from None


def _describe(nproc: int, backend: str | None, gpus: int, pace: Pace | None, payload: bytes) -> dict:
    """The job as the server needs it: everything but the file descriptors."""
    threads = machine.threads_per_rank(nproc)
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in SCRUBBED and not key.startswith(SCRUBBED_PREFIXES)
    }
    environments = [
        {
            **kept,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "OMP_NUM_THREADS": str(threads),
            "MPLBACKEND": "Agg",
            INSIDE_A_RANK: str(rank),
        }
        for rank in range(nproc)
    ]
    paced = pace is not None and backend is not None
    return {
        "world_size": nproc,
        "heavy": any(marker in payload for marker in HEAVY_MARKERS),
        "environments": environments,
        "devices": [machine.device_for(rank, backend or "gloo", gpus) for rank in range(nproc)],
        "common": {
            "world_size": nproc,
            "path": [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path],
            "argv": list(sys.argv),
            "directory": os.getcwd(),
            "threads": threads,
            "backend": "paced" if paced else backend,
            "pace": pace.to_dict() if pace is not None else None,
        },
    }


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
    reports = [state.pace_report for state in job.ranks if state.pace_report]
    run = Run(
        name=name,
        nproc=len(job.ranks),
        backend=backend,
        kind="paced" if pace is not None and pace.gbps is not None else "measured",
        results=results,
        logs=Logs([state.log.text() for state in job.ranks]),
        spans=spans,
        seconds=seconds,
        traffic=[report["traffic"] for report in reports],
    )
    warning = verdict(reports) if pace is not None and reports else None
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
        return JobTimeout(_stall_report(job, run, timeout), run)
    if failures:
        return RankError(_rank_report(job, primary(failures)), run)
    if any(state.result is None for state in job.ranks):
        return JobError(
            "the process that starts ranks was killed, and the ranks with it. Launch again: a new one is started.",
            run,
        )
    return None


def _rank_report(job: Job, cause: RankFailure) -> str:
    """The primary failure in full, and one line for each other rank."""
    where = {"teardown": " after its function had returned", "importing": " while loading the function"}
    lines = [f"rank {cause.rank} of {len(job.ranks)} failed{where.get(cause.stage, '')}", ""]
    lines += [format_failure(cause), ""]
    for rank, state in enumerate(job.ranks):
        if rank == cause.rank:
            continue
        if state.failure is not None:
            text = one_line(state.failure)
        else:
            text = describe_rank(state.stage, state.result is not None, state.standing, None)
        lines.append(f"rank {rank}: {text}")
    printed = job.ranks[cause.rank].log.text().rstrip().splitlines()
    if cause.kind in ("signal", "exit") and printed:
        lines += ["", f"The last that rank {cause.rank} printed:", *(f"  {line}" for line in printed[-8:])]
    return "\n".join(lines).rstrip()


def _stall_report(job: Job, run: Run, timeout: float) -> str:
    """Each rank's stack, side by side, and what the pattern means."""
    head = (
        f"{run.name} did not end within {timeout:g} s on {len(job.ranks)} ranks, and was stopped."
        if job.timed_out
        else f"{run.name} stalled: a collective waited longer than its process group allows."
    )
    lines = [head, ""]
    finished: list[int] = []
    standings: dict[int, Standing | None] = {}
    for rank, state in enumerate(job.ranks):
        done = state.result is not None
        failed = one_line(state.failure) if state.failure is not None else None
        lines.append(f"  rank {rank}: {describe_rank(state.stage, done, state.standing, failed)}")
        if done:
            finished.append(rank)
        elif failed is None:
            standings[rank] = state.standing
    lines += ["", advise(finished, standings)]
    return "\n".join(lines)


def _large_payload(payload: bytes, fn: Callable, args: tuple, kwargs: dict) -> str:
    sizes = large_variables(fn, args, kwargs)
    named = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.items())
    return (
        f"the function carries {len(payload) / 2**20:.0f} MiB to every rank ({named}). "
        "Load large data inside the function instead."
    )


__all__ = ["JobError", "JobInterrupted", "JobTimeout", "RankError", "ServerDied", "last_run", "launch"]
