"""Why is my DDP job slower than one process? Where a step's time went, and what to change first."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_lib.analysis import EXPOSED, median_step, step_breakdown
from course_lib.failures import wrap
from course_lib.spans import LINK, Span

if TYPE_CHECKING:
    from course_lib.run import Run

SMALL_PART = 0.1
SMALL_BUCKET_BYTES = 256 * 1024


@dataclass
class Explanation:
    """Where the time of one step went on one rank. Shows itself as a table with one piece of advice.

    seconds: by part ("input", "forward", "backward", "exposed communication", "optimizer", your own spans,
    "other"); they add up to the step. advice: what to change first.
    """

    rank: int
    step: int | None
    kind: str
    seconds: dict[str, float]
    advice: str

    @property
    def step_seconds(self) -> float:
        """How long the step took."""
        return sum(self.seconds.values())

    def _rows(self) -> list[tuple[str, str, str]]:
        whole = self.step_seconds or 1.0
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        return [
            (name, f"{seconds * 1e3:.1f} ms", f"{seconds / whole:.0%}")
            for name, seconds in parts
            if seconds > 0
        ]

    def _headline(self) -> str:
        return f"rank {self.rank}, step {self.step}: {self.step_seconds * 1e3:.1f} ms ({self.kind})"

    def __repr__(self) -> str:
        lines = [self._headline()]
        lines += [f"  {name:<24}{time:>10}{share:>6}" for name, time, share in self._rows()]
        return "\n".join([*lines, wrap(self.advice)])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td><td>{time}</td><td>{share}</td></tr>"
            for name, time, share in self._rows()
        )
        return (
            f"<div><b>{html.escape(self._headline())}</b></div><table>{rows}</table>"
            f"<div>{html.escape(self.advice)}</div>"
        )


def explain(run: Run, rank: int = 0) -> Explanation:
    """Explain the median step of `rank`. Raises ValueError where the run recorded no step."""
    step = median_step(run.spans, rank)
    if step is None:
        raise ValueError(
            "this run recorded no training step: call probe(model) in the function, then launch it again"
        )
    seconds = step_breakdown(run.spans, rank, step)
    transfers = [s for s in run.spans if s.rank == rank and s.step == step and s.lane == LINK]
    return Explanation(rank, step, run.kind, seconds, _advise(seconds, transfers))


def _advise(seconds: dict[str, float], transfers: list[Span]) -> str:
    whole = sum(seconds.values()) or 1.0
    waits = {name: seconds[name] / whole for name in ("input", EXPOSED)}
    worst = max(waits, key=lambda name: waits[name])
    if waits[worst] < SMALL_PART:
        return "Less than a tenth of the step is spent waiting: the step is as long as its computation."
    if worst == "input":
        return (
            f"{waits['input']:.0%} of the step waits for data. First give the DataLoader workers "
            "(num_workers) and let them run ahead (prefetch_factor)."
        )
    sizes = [span.bytes or 0 for span in transfers]
    if len(sizes) > 4 and sum(sizes) / len(sizes) < SMALL_BUCKET_BYTES:
        return (
            f"{waits[EXPOSED]:.0%} of the step waits for communication, in {len(sizes)} small transfers: "
            "their latency adds up. First try a larger bucket_cap_mb."
        )
    if len(sizes) == 1:
        return (
            f"{waits[EXPOSED]:.0%} of the step waits for communication, and all gradients travel in "
            "one bucket, which cannot start before the last of them is computed. "
            "First try a smaller bucket_cap_mb."
        )
    return (
        f"{waits[EXPOSED]:.0%} of the step waits for communication that no computation hides. "
        "Send less often (no_sync over several batches), send less (a compression hook), or compute more "
        "between transfers (a larger batch)."
    )
