"""The two reports on a job that did not end well: a rank that failed, and ranks that stalled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_lib.failures import RankFailure, format_failure, one_line, wrap
from course_lib.stacks import Standing
from course_lib.stall import advise, describe_rank, name_ranks

if TYPE_CHECKING:
    from course_lib.job import Job


def rank_report(job: Job, cause: RankFailure) -> str:
    """The primary failure in full, and one line for each other rank."""
    where = {"teardown": " after its function had returned", "importing": " while loading the function"}
    lines = [f"rank {cause.rank} of {len(job.ranks)} failed{where.get(cause.stage, '')}", ""]
    lines += [format_failure(cause), ""]
    others: dict[str, list[int]] = {}
    for rank, state in enumerate(job.ranks):
        if rank == cause.rank:
            continue
        if state.failure is not None and state.failure.text == cause.text:
            text = "failed in the same way"
        elif state.failure is not None:
            text = one_line(state.failure)
        else:
            text = describe_rank(state.stage, state.result is not None, state.standing, None)
        others.setdefault(text, []).append(rank)
    lines += [f"{name_ranks(ranks)}: {text}" for text, ranks in others.items()]
    printed = job.ranks[cause.rank].log.text().rstrip().splitlines()
    if cause.kind in ("signal", "exit") and printed:
        lines += ["", f"The last that rank {cause.rank} printed:", *(f"  {line}" for line in printed[-8:])]
    return "\n".join(lines).rstrip()


def stall_report(job: Job, name: str, timeout: float) -> str:
    """Each rank's stack, side by side, and what the pattern means."""
    head = (
        f"{name} did not end within {timeout:g} s on {len(job.ranks)} ranks, and was stopped."
        if job.timed_out
        else f"{name} stalled: a collective waited longer than its process group allows."
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
    lines += ["", wrap(advise(finished, standings))]
    return "\n".join(lines)
