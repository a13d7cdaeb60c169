"""What keeps an answer from being compared: it is not written, fails, hangs, or gives nothing usable."""

from __future__ import annotations

import dis
import re
import types
from typing import Any

from course_lib.failures import JobTimeout, shorten
from course_lib.run import Run

STUB_TEXTS = ("", "your code here")
DETAIL_CHARACTERS = 5000
_NOTHING = {"RESUME", "NOP", "POP_TOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE", "CACHE"}


class NotAttempted(Exception):
    """The answer is still the stub, or part of it is."""


class NotYet(Exception):
    """An answer that does not pass: a diagnosis (a short name), what to say, and the facts behind it.

    tried: what was run. expected, got: in words. rank: where it shows. details: longer text, kept as it is.
    """

    def __init__(
        self,
        diagnosis: str,
        says: str,
        *,
        tried: str = "",
        expected: str = "",
        got: str = "",
        rank: int | None = None,
        details: str = "",
    ) -> None:
        super().__init__(f"{diagnosis}: {says}")
        self.diagnosis, self.says = diagnosis, says
        self.tried, self.expected, self.got, self.rank = tried, expected, got, rank
        self.details = details


def name_of(answer: Any) -> str:
    """An answer's name, as code."""
    if isinstance(answer, tuple):
        return " and ".join(map(name_of, answer))
    return f"`{getattr(answer, '__name__', type(answer).__name__)}`"


def untouched(answer: Any) -> bool:
    """Whether an answer is a stub: None, `...`, or a function that does nothing but that, or raises."""
    if answer is None or answer is ...:
        return True
    if not isinstance(answer, types.FunctionType):
        return False
    code = answer.__code__
    steps = list(dis.get_instructions(code))
    if all(step.opname in _NOTHING for step in steps):
        constants = [s.argval for s in steps if s.opname in ("LOAD_CONST", "RETURN_CONST")]
        return all(value is None or value is ... for value in constants)
    raises = any(step.opname == "RAISE_VARARGS" for step in steps)
    said = [step.argval for step in steps if step.opname == "LOAD_CONST" and isinstance(step.argval, str)]
    at_once = code.co_names == ("NotImplementedError",) and len(steps) < 12
    return raises and at_once and all(text in STUB_TEXTS for text in said)


def explain(run: Run, called: str, tried: str) -> NotYet | NotAttempted:
    """What a failed job says about the learner's code."""
    # The job is known by the name of the function that calls the answer, which is not the learner's.
    text = str(run.failure).replace(f"{run.name} did not end", f"{called} did not end")
    text = text.replace(f"{run.name} stalled", f"{called} stalled")
    if "StubReached" in text:
        return NotAttempted(called)
    text = shorten(text, DETAIL_CHARACTERS)
    rank_named = re.match(r"rank (\d+) of", text)
    rank = int(rank_named[1]) if rank_named else None
    if isinstance(run.failure, JobTimeout):
        waiting = re.search(
            r"\bwait(ed|s|ing)? (in|for)\b|wait in ", text.replace("No rank was waiting for", "")
        )
        if waiting:
            diagnosis = "deadlock"
            says = (
                f"{called} did not come back: ranks waited for each other until the time was up. "
                "Does every rank make the same calls, in the same order?"
            )
        else:
            diagnosis = "endless loop"
            says = (
                f"{called} did not come back in time, and no rank waited for another: a loop that never ends?"
            )
        return NotYet(diagnosis, says, tried=tried, details=text)
    if "SystemExit" in text or "its process ended with exit status" in text:
        says = f"{called} ended the whole process instead of returning. Take `exit` out."
        return NotYet("left early", says, tried=tried, rank=rank, details=text)
    if "ended by SIG" in text or "ended by signal" in text:
        return NotYet("crash", f"{called} crashed its process.", tried=tried, rank=rank, details=text)
    says = f"{called} raised an error" + (f" on rank {rank}." if rank is not None else ".")
    return NotYet("an error", says, tried=tried, rank=rank, details=text)


def raise_for(result: dict[str, Any], called: str, tried: str, rank: int) -> None:
    """Raise NotYet where an answer came back, but gave nothing usable or changed its inputs."""
    if "unreturnable" in result:
        raise NotYet(
            "wrong type",
            f"{called} returned a `{result['unreturnable']}`, and something else is asked for.",
            tried=tried,
            got=result["why"],
            rank=rank,
        )
    if result["edited"] is not None:
        raise NotYet(
            "edits its input",
            f"{called} changed {result['edited'] or 'its arguments'} in place. Its caller still needs that: "
            "work on a copy (`tensor.clone()`), and return the result.",
            tried=tried,
            rank=rank,
        )
