"""What a judge works with: run the learner's code on real ranks, compare, count, and say what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from course_lib.check import trouble
from course_lib.check.trouble import NotAttempted, NotYet
from course_lib.failures import JobTimeout
from course_lib.launch import launch
from course_lib.pace import Pace
from course_lib.run import Run
from course_lib.travel import CannotTravel

if TYPE_CHECKING:
    from course_lib.check.signatures import Signature

__all__ = ["Lab", "NotAttempted", "NotYet", "Outcome"]

JOB_SECONDS = 8.0
Inputs = tuple | list[tuple] | Callable[[int], tuple]


@dataclass
class Outcome:
    """What the learner's code gave. results: by rank. run: the job. tried: what was run, in words."""

    results: list[Any]
    run: Run = field(repr=False)
    tried: str

    def calls(self, name: str) -> list[int]:
        """How often each rank called a collective, such as "all_reduce". Needs a pace."""
        return self._counted(name, "calls")

    def payload_bytes(self, name: str) -> list[int]:
        """The bytes that each rank handed over to a collective. Needs a pace."""
        return self._counted(name, "payload_bytes")

    def messages(self, name: str) -> list[int]:
        """The messages that each rank's link carried for a collective. Needs a pace."""
        return self._counted(name, "messages")

    def bytes_sent(self, name: str | None = None) -> list[int]:
        """The bytes that each rank's link sent, for one collective or for all. Needs a pace."""
        if name is not None:
            return self._counted(name, "bytes_sent")
        return [int(sum(row["bytes_sent"] for row in rank.values())) for rank in self.run.traffic]

    def collectives(self) -> list[dict[str, int]]:
        """What each rank called, and how often. Needs a pace."""
        return [{name: int(row["calls"]) for name, row in rank.items()} for rank in self.run.traffic]

    def _counted(self, name: str, what: str) -> list[int]:
        return [int(rank.get(name, {}).get(what, 0)) for rank in self.run.traffic]


class Lab:
    """One check's laboratory. limit: seconds that all of its jobs may take together."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.checked: list[str] = []
        self.last: Outcome | None = None
        self._began = time.monotonic()

    def call(
        self,
        answer: Any,
        inputs: Inputs = (),
        nproc: int = 2,
        *,
        via: Callable | None = None,
        tried: str = "",
        pace: Pace | None = None,
        may_edit: bool = False,
        stagger: float = 0.0,
        timeout: float = JOB_SECONDS,
        backend: str | None = "gloo",
    ) -> Outcome:
        """Run `answer(*inputs)`, or `via(answer, *inputs)`, on `nproc` ranks, and return what it gave.

        inputs: a tuple for all ranks, a list of one tuple a rank, or a function from rank to tuple. via: a
        module-level function that runs in the rank. tried: what this case is, for the message. may_edit:
        whether inputs may be changed in place. stagger: seconds by which each rank starts later than the one
        before. Raises NotYet or NotAttempted for whatever keeps the answer from returning on every rank
        within `timeout` seconds.
        """
        from course_lib.check.inrank import observe

        called = trouble.name_of(answer)
        for part in answer if isinstance(answer, tuple) else (answer,):
            if not callable(part):
                raise NotYet(
                    "wrong type",
                    f"The check needs a function to call, and was given `{part!r}`. Pass the function "
                    "itself, as in `check(…, name)`, without calling it.",
                )
        by_rank = _by_rank(inputs, nproc)
        where = f"{called} on {nproc} {'rank' if nproc == 1 else 'ranks'}"
        tried = f"{where}, {tried}" if tried else where
        left = self.limit - (time.monotonic() - self._began)
        if left <= 0:
            raise NotYet(
                "too slow",
                f"The check stopped after {self.limit:g} s: your code takes too long.",
                tried=tried,
            )
        try:
            run = launch(
                observe,
                nproc,
                args=(answer, via, by_rank, may_edit, stagger),
                backend=backend,
                pace=pace,
                timeout=min(timeout, max(left, 1.0)),
                check=False,
                progress=False,
            )
        except CannotTravel as error:
            raise NotYet("cannot travel", str(error), tried=tried) from None
        self.last = Outcome([], run, tried)
        if isinstance(run.failure, JobTimeout) and left < timeout:
            raise self._too_slow(tried)
        if run.failure is not None:
            raise trouble.explain(run, called, tried)
        for rank, result in enumerate(run.results):
            trouble.raise_for(result, called, tried, rank)
            self.last.results.append(result["value"])
        return self.last

    def _too_slow(self, tried: str) -> NotYet:
        says = (
            f"The check stopped after {self.limit:g} s: your code, or this machine just now, takes too long."
        )
        return NotYet("too slow", says, tried=tried)

    def same(
        self,
        outcome: Outcome | Sequence[Any],
        expected: Sequence[Any],
        *,
        what: str = "the result",
        local: Sequence[Any] | None = None,
        inputs: Sequence[Any] | None = None,
        signatures: Sequence[Signature] = (),
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        """Raise NotYet, with a diagnosis, unless each rank's result is what the oracle expects there.

        expected: by rank: tensors, numbers, or lists and dicts of them. local: what each rank holds before
        anything is exchanged, inputs: what it was given, both in the same structure; they help to recognise
        mistakes. signatures: mistakes that only this exercise knows (`equals(…)`). rtol, atol: the tolerance,
        by default that of the dtype.
        """
        from course_lib.check.diagnosis import diagnose

        results = outcome.results if isinstance(outcome, Outcome) else list(outcome)
        tried = outcome.tried if isinstance(outcome, Outcome) else ""
        found = diagnose(results, list(expected), what, local, inputs, signatures, rtol, atol)
        if found is not None:
            found.tried = tried
            raise found

    def require(
        self,
        condition: object,
        diagnosis: str,
        says: str,
        *,
        expected: str = "",
        got: str = "",
        rank: int | None = None,
    ) -> None:
        """Raise NotYet with this diagnosis unless `condition` holds."""
        if not condition:
            tried = self.last.tried if self.last is not None else ""
            raise NotYet(diagnosis, says, tried=tried, expected=expected, got=got, rank=rank)

    def number(
        self, answer: Any, *, what: str = "the answer", low: float | None = None, high: float | None = None
    ) -> float:
        """`answer` as a number within its range, for answers that are not functions. Raises NotYet."""
        import math

        if callable(answer):
            raise NotYet(
                "wrong type", f"{what} is to be a number, not a function: call it, and pass the result."
            )
        if hasattr(answer, "item") and getattr(answer, "ndim", None) == 0:
            answer = answer.item()
        if isinstance(answer, bool) or not isinstance(answer, (int, float)):
            raise NotYet("wrong type", f"{what} is to be a number, and `{answer!r}` is none.")
        if not math.isfinite(answer):
            raise NotYet("wrong type", f"{what} is to be a finite number, not {answer}.")
        if (low is not None and answer < low) or (high is not None and answer > high):
            ends = [
                f"at least {low:g}" if low is not None else "",
                f"at most {high:g}" if high is not None else "",
            ]
            raise NotYet(
                "out of range", f"{what} is to be {' and '.join(filter(None, ends))}, not {answer:g}."
            )
        return answer

    def note(self, text: str) -> None:
        """Add a line to what a pass says was checked, such as "2, 3 and 4 ranks: equal to one process"."""
        self.checked.append(text)


def _by_rank(inputs: Inputs, nproc: int) -> list[tuple]:
    """The arguments of each rank."""
    if callable(inputs):
        return [tuple(inputs(rank)) for rank in range(nproc)]
    if isinstance(inputs, list):
        if len(inputs) != nproc:
            raise ValueError(f"inputs has {len(inputs)} tuples for {nproc} ranks")
        return [tuple(own) for own in inputs]
    return [inputs] * nproc
