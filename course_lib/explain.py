"""Why is my DDP job slower than one process? Where a step's time went, and what to change first."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_lib.analysis import (
    EXPOSED,
    OTHER,
    WAITING,
    WAITING_LANE,
    communication,
    effective,
    hidden,
    last_ranks,
    median_step,
    of_step,
    ranks,
    step_breakdown,
    steps,
)
from course_lib.failures import wrap
from course_lib.figure import binary_size, milliseconds
from course_lib.hardware import usable_cores
from course_lib.intervals import total
from course_lib.spans import INPUT, LINK, Span

if TYPE_CHECKING:
    from course_lib.run import Run

SMALL_PART = 0.1
LARGE_OTHER = 0.2
SMALL_BUCKET_BYTES = 256 * 1024
FEW_BUCKETS = 4
# Handing a batch over from another process takes about as long.
SHORT_INPUT_SECONDS = 0.002


@dataclass
class Explanation:
    """Where the time of one step went on one rank. Shows itself as a table with one piece of advice.

    seconds: by part ("input", "forward", "backward", "waiting for other ranks", "exposed communication",
    "optimizer", your own spans, "other"); they add up to the step. advice: what to change first.
    only_first: whether no step but the first was recorded.
    """

    rank: int
    step: int | None
    kind: str
    seconds: dict[str, float]
    advice: str
    only_first: bool = False

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
        only = "; only the first step was recorded, and it is not typical" if self.only_first else ""
        return f"rank {self.rank}, step {self.step}: {self.step_seconds * 1e3:.1f} ms ({self.kind}{only})"

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
    """Explain one step on `rank`: the one of median length over all ranks, which `timeline` draws too.

    Raises ValueError where the run recorded no step, or none of that rank.
    """
    step = median_step(run.spans)
    if step is None:
        raise ValueError(
            "this run recorded no training step: call probe(model) in the function, and see that its loop "
            "runs at least once"
        )
    seconds = step_breakdown(run.spans, rank, step)
    advice = _Advice(run.spans, run.kind, rank, step, seconds)
    return Explanation(rank, step, run.kind, seconds, advice.text(), steps(run.spans) == [0])


class _Advice:
    """What to change first. spans: those of the whole run; seconds: the breakdown of the step."""

    def __init__(self, spans: list[Span], kind: str, rank: int, step: int, seconds: dict[str, float]) -> None:
        self.spans, self.kind, self.rank, self.step, self.seconds = spans, kind, rank, step, seconds
        self.inside = [span for span in effective(of_step(spans, step)) if span.rank == rank]
        self.whole = sum(seconds.values()) or 1.0

    def share(self, name: str) -> float:
        """The part of the step that `name` took."""
        return self.seconds[name] / self.whole

    def text(self) -> str:
        """The advice on the largest wait, and a word on what was not recorded where that is much."""
        worst = max((INPUT, WAITING, EXPOSED), key=self.share)
        advice = {INPUT: self.on_input, WAITING: self.on_waiting, EXPOSED: self.on_communication}[worst]
        unknown = self.share(OTHER) > LARGE_OTHER
        if self.share(worst) < SMALL_PART:
            if unknown:
                return self.on_other()
            return "Less than a tenth of the step is spent waiting: the step is as long as its computation."
        if not unknown:
            return advice()
        both = [advice(), self.on_other()]
        return " ".join(both if self.share(worst) >= self.share(OTHER) else reversed(both))

    def on_other(self) -> str:
        """On time that no span accounts for."""
        return (
            f"In {self._amount(OTHER)} nothing was recorded: Python between the calls, and the machine's own "
            "overhead. Put span('name') around your own code to see more of it."
        )

    def on_input(self) -> str:
        """On waiting for data."""
        if self.seconds[INPUT] < SHORT_INPUT_SECONDS:
            return (
                f"{self._amount(INPUT)} goes into fetching the batch. That is too short for a "
                "DataLoader worker to help: handing a batch over takes about as long. "
                "Give each step more to compute (a larger batch)."
            )
        return (
            f"{self._amount(INPUT)} waits for data. First give the DataLoader workers "
            "(num_workers) and let them run ahead (prefetch_factor)."
        )

    def on_waiting(self) -> str:
        """On waiting for the rank that launches last."""
        waits: dict[str, float] = {}
        for span in self.inside:
            if span.lane == WAITING_LANE:
                waits[span.detail] = waits.get(span.detail, 0.0) + span.seconds
        whom = max(waits, key=lambda detail: waits[detail])
        what = f"{self._amount(WAITING)} rank {self.rank} waits for {whom or 'other ranks'}"
        if whom:
            what += ", the last to launch its transfers"
        crowd = self._crowd()
        if crowd:
            return (
                f"{what}. {crowd}, so they cannot all compute at once: run no more ranks than cores, "
                "or paced layers."
            )
        last = [by for step, by in last_ranks(self.spans).items() if step is not None]
        times = sum(f"rank {by}" == whom for by in last)
        if whom and 2 * times <= len(last):
            return (
                f"{what}. But it was the last in only {times} of {len(last)} steps: the delay moves from "
                "rank to rank, as it does where the machine is busy with something else. Measure again with "
                "less running."
            )
        return (
            f"{what}"
            + (f" in {times} of {len(last)} steps" if whom and len(last) > 1 else "")
            + ". Give the ranks equal work: as many samples, as long, on equally fast devices."
        )

    def on_communication(self) -> str:
        """On communication that nothing hides."""
        crowd = self._crowd()
        what = f"{crowd}, and communication needs them too. " if crowd else ""
        what += f"{self._amount(EXPOSED)} waits for communication"
        buckets = [s for s in self.inside if s.lane == LINK and s.detail.startswith("bucket")]
        sizes = [span.bytes or 0 for span in buckets]
        behind = max(0.0, _total_of(self.inside, "backward") - hidden(self.inside))
        against = (
            f"{milliseconds(total(communication(self.inside)))} ms of communication stand against "
            f"{milliseconds(_total_of(self.inside, 'backward'))} ms of backward"
        )
        if buckets and self.step == 0:
            return (
                f"{what}. In DDP's first step all gradients travel in one bucket, whatever the cap: "
                "let the loop run several steps before you judge."
            )
        if len(sizes) > FEW_BUCKETS and sum(sizes) / len(sizes) < SMALL_BUCKET_BYTES:
            return (
                f"{what}, in {len(sizes)} small buckets, {binary_size(sum(sizes) / len(sizes))} on average: "
                "their latencies add up. First try a larger bucket_cap_mb."
            )
        less = (
            "Send less often (no_sync over several batches), send less (a compression hook), or compute more "
            "between transfers (a larger batch)."
        )
        if not buckets:
            return f"{what} that no computation hides: {against}. {less}"
        rest = "the rest" if hidden(self.inside) > self.seconds[EXPOSED] / 20 else "it"
        if behind < self.seconds[EXPOSED] / 4:
            count = "one bucket" if len(sizes) == 1 else f"{len(sizes)} buckets"
            return f"{what}, in {count}: {against}, so no bucket size can hide {rest}. {less}"
        if len(sizes) > FEW_BUCKETS:
            return f"{what} that no computation hides: {against}. {less}"
        if len(sizes) == 1:
            what += ", and all gradients travel in one bucket, which cannot start before the last is computed"
        else:
            what += f", in {len(sizes)} buckets, and the link is idle during part of backward"
        gain = milliseconds(min(behind, self.seconds[EXPOSED]))
        return f"{what}. First try a smaller bucket_cap_mb: at most {gain} ms more can hide behind backward."

    def _crowd(self) -> str:
        """That more ranks than cores compute here; empty where they do not."""
        number, cores = len(ranks(self.spans)), usable_cores()
        if self.kind != "measured" or number <= cores:
            return ""
        return f"Here {number} ranks share {cores} core" + ("s" if cores > 1 else "")

    def _amount(self, name: str) -> str:
        return f"{self.share(name):.0%} of the step ({milliseconds(self.seconds[name])} ms)"


def _total_of(spans: list[Span], name: str) -> float:
    """Seconds in spans of this name."""
    return total((span.start, span.end) for span in spans if span.name == name)
