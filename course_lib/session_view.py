"""What a cell that ran on ranks gave: how it shows itself, by rank, and how its failure is told."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

from course_lib.failures import RankFailure, format_failure, one_line, wrap
from course_lib.run import Run
from course_lib.session_job import TIMED_OUT, SessionJob
from course_lib.stall import advise, describe_rank, name_ranks

SHOWN_LINES = 40
KEPT = "The ranks are ready for the next cell and keep their variables."
REGROUPED = (
    "The ranks keep their variables. Their process group was made anew, since the old one could not be used "
    "any more: groups and DDP models made before are not valid; make those again."
)
LEFT = (
    "The ranks keep their variables. Their process group could not be used any more and was destroyed: "
    "make it anew with init_process_group."
)
LOST = "The ranks were started anew, and ALL THEIR VARIABLES ARE GONE: run the cells that made them again."


@dataclass(repr=False)
class CellRun(Run):
    """What one cell gave on ranks that stay. A `Run` whose `results` are the last expressions, as text.

    ranks: those that ran the cell; the others have an empty log and no result. aftermath: what a failure has
    left of the ranks and their variables. seconds: the cell's own work on the slowest rank, if it ended.
    answers, failures: what each rank that answered sent back, and what happened to those that failed.
    """

    ranks: list[int] = field(default_factory=list)
    aftermath: str = ""
    answers: dict[int, bytes] = field(default_factory=dict)
    failures: dict[int, RankFailure] = field(default_factory=dict)

    def by_rank(self) -> dict[int, str]:
        """What each rank printed, and below it what its last expression gave."""
        parts = {}
        for rank in self.ranks:
            text = "\n".join(
                part.rstrip("\n") for part in (self.logs[rank], self.results[rank] or "") if part
            )
            lines = text.splitlines()
            if len(lines) > SHOWN_LINES:
                half = SHOWN_LINES // 2
                left_out = f"[… {len(lines) - 2 * half} lines left out: see world.last.logs[{rank}] …]"
                lines = [*lines[:half], left_out, *lines[-half:]]
            parts[rank] = "\n".join(lines)
        return parts

    @property
    def silent(self) -> bool:
        """Whether there is nothing to show."""
        return not any(self.by_rank().values()) and not self.warnings and self.failure is None

    def __repr__(self) -> str:
        lines = []
        for rank, text in self.by_rank().items():
            lines += [f"rank {rank}: {line}" for line in text.splitlines()]
        lines += [f"note: {warning}" for warning in self.warnings]
        if self.failure is not None:
            lines += [f"{type(self.failure).__name__}: {self.failure}"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = []
        shown = self.by_rank()
        if any(shown.values()):
            columns = f"grid-template-columns:repeat(auto-fit,minmax({_width(shown)}ch,1fr))"
            pre = "margin:0;white-space:pre-wrap;font-family:monospace"
            boxes = [
                "<div style='border-left:2px solid #BBB;padding-left:8px;overflow-x:auto'>"
                f"<div style='color:#707070'>rank {rank}</div>"
                f"<pre style='{pre}'>{html.escape(text)}</pre></div>"
                for rank, text in shown.items()
            ]
            parts.append(f"<div style='display:grid;gap:6px 14px;{columns}'>{''.join(boxes)}</div>")
        parts += [f"<div><b>Note.</b> {html.escape(warning)}</div>" for warning in self.warnings]
        if self.failure is not None:
            text = html.escape(f"{type(self.failure).__name__}: {self.failure}")
            parts.append(f"<pre style='white-space:pre-wrap'>{text}</pre>")
        return "".join(parts)


def _width(shown: dict[int, str]) -> int:
    """The least width of a rank's column, in characters: as wide as its lines, within limits."""
    longest = max(len(line) for text in shown.values() for line in ["", *text.splitlines()])
    return min(max(longest, 18), 60)


def error_report(job: SessionJob, cause: RankFailure) -> str:
    """The failure that came first in full, and one line for each other rank."""
    when = "" if job.asked else " before this cell began"
    lines = [f"rank {cause.rank} of {len(job.ranks)} failed{when}", ""]
    lines += [_in_a_cell(format_failure(cause)), ""]
    lines += _standings(job, [rank for rank in range(len(job.ranks)) if rank != cause.rank], cause)
    printed = job.ranks[cause.rank].log.text().rstrip().splitlines()
    if cause.kind in ("signal", "exit") and printed:
        lines += ["", f"The last that rank {cause.rank} printed:", *(f"  {line}" for line in printed[-8:])]
    return "\n".join(lines)


def stall_report(job: SessionJob, how: str, seconds: float) -> str:
    """Where each rank stood, side by side, and what the pattern means."""
    ended = f"did not end within {seconds:g} s" if how == TIMED_OUT else "waited for a rank that gave up"
    lines = [f"The cell {ended} on {_count(len(job.asked))}.", ""]
    lines += [f"  {line}" for line in _standings(job, list(range(len(job.ranks))))]
    absent = [rank for rank in range(len(job.ranks)) if rank not in job.asked]
    names = sorted({s.collective for s in job.standings.values() if s is not None and s.collective})
    if absent and names and len(job.standings) == len(job.asked):
        advice = (
            f"{' and '.join(names)} needs every rank of its group, and {_count(len(absent))} of "
            f"{len(job.ranks)} did not run this cell. Run it on all, or make a group of those that do "
            "(dist.new_group, called on every rank)."
        )
    else:
        finished = [rank for rank in job.asked if job.ranks[rank].result is not None]
        advice = advise(finished, job.standings, "the cell (%%ranks timeout=60) or Ranks")
    return "\n".join([*lines, "", wrap(advice)])


def interrupt_report(job: SessionJob) -> str:
    """Where each rank stood when you interrupted the cell."""
    return "\n".join(
        [
            "You interrupted the cell. Where the ranks stood:",
            "",
            *(f"  {line}" for line in _standings(job, list(range(len(job.ranks))))),
        ]
    )


def _standings(job: SessionJob, ranks: list[int], cause: RankFailure | None = None) -> list[str]:
    """Where these ranks stood or how they ended, in one line for all that did so alike."""
    alike: dict[str, list[int]] = {}
    for rank in ranks:
        alike.setdefault(_where(job, rank, cause), []).append(rank)
    return [f"{name_ranks(those)}: {text}" for text, those in alike.items()]


def _where(job: SessionJob, rank: int, cause: RankFailure | None) -> str:
    state = job.ranks[rank]
    if cause is not None and state.failure is not None and state.failure.text == cause.text:
        return "failed in the same way"
    if rank not in job.asked and state.failure is None:
        return "did not run this cell"
    if rank in job.standings:
        return describe_rank("running", False, job.standings[rank], None)
    failed = _in_a_cell(one_line(state.failure)) if state.failure is not None else None
    return describe_rank("running", state.result is not None, None, failed)


def _in_a_cell(text: str) -> str:
    return text.replace(" before the function returned", "")


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
