"""`check`: give an answer to its judge, and turn what comes of it into a result that shows itself."""

from __future__ import annotations

import inspect
import time
import traceback
from typing import Any

from course_lib.check import progress
from course_lib.check.lab import Lab
from course_lib.check.registry import Exercise, all_exercises, find
from course_lib.check.result import NOT_ATTEMPTED, NOT_YET, PASSED, Result, ShownHint, printed_lines
from course_lib.check.trouble import NotAttempted, NotYet, untouched
from course_lib.failures import JobError, shorten
from course_lib.forkserver import ServerDied


class CheckFailed(AssertionError):
    """A strict check that did not pass. `result` is what it would have shown."""

    def __init__(self, result: Result) -> None:
        super().__init__(repr(result))
        self.result = result


class Checker:
    """`check("4.1", answer)`; `check.hint("4.1")`; `check.report()`."""

    def __call__(self, name: str, *answers: Any, strict: bool = False) -> Result:
        """Check the answer, or answers, to an exercise.

        The result shows itself; its `outcome` is "passed", "not yet" or "not attempted". strict: raise
        CheckFailed unless it passed. Raises ValueError for an exercise that does not exist, and TypeError
        for a wrong number of answers.
        """
        exercise = find(name)
        wanted = list(inspect.signature(exercise.judge).parameters)[1:]
        if len(answers) != len(wanted):
            call = ", ".join([f'"{exercise.name}"', *wanted])
            raise TypeError(f"check({call}) takes {len(wanted)} answer(s), and was given {len(answers)}")
        began = time.monotonic()
        result = _judged(exercise, answers)
        result.seconds = time.monotonic() - began
        progress.note_outcome(exercise.name, result.outcome, result.diagnosis)
        if strict and not result.passed:
            raise CheckFailed(result)
        return result

    def hint(self, name: str, number: int | None = None) -> ShownHint:
        """The next hint to an exercise, or hint `number`, from 1. After the last one, the last one again."""
        exercise = find(name)
        count = len(exercise.hints)
        if not count:
            raise ValueError(f"exercise {exercise.name} has no hints")
        if number is None:
            number = min(progress.hints_seen(exercise.name) + 1, count)
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= count:
            raise ValueError(f"exercise {exercise.name} has hints 1 to {count}, and no hint {number!r}")
        progress.note(exercise.name, hints=max(number, progress.hints_seen(exercise.name)))
        more = "This is the last one." if number == count else f"{count - number} more."
        return ShownHint(exercise.name, number, count, exercise.hints[number - 1], more)

    def report(self, who: str = "") -> progress.Report:
        """Every exercise and what came of it. who: a name to put on it; `.save()` writes it to a file."""
        return progress.Report(all_exercises(), who)

    def __repr__(self) -> str:
        return 'check("4.1", answer) checks an answer; check.hint("4.1"); check.report()'


check = Checker()


def _judged(exercise: Exercise, answers: tuple) -> Result:
    """What the judge makes of the answers."""

    def result(outcome: str, message: str, **more: Any) -> Result:
        return Result(exercise.name, exercise.title, outcome, message, **more)

    stub = f'Write your answer, and run the cell again. `check.hint("{exercise.name}")` gives a hint.'
    if any(map(untouched, answers)):
        return result(NOT_ATTEMPTED, stub)
    lab = Lab(exercise.limit)
    try:
        exercise.judge(lab, *answers)
    except NotAttempted:
        return result(NOT_ATTEMPTED, stub)
    except NotYet as found:
        pass_on = found
    except ServerDied:
        raise
    except JobError as error:
        pass_on = NotYet(
            "the check failed",
            "A job of the check's own, without your code, did not end well. Run the check again.",
            details=shorten(str(error)),
        )
    except Exception as error:
        # A judge that stumbles over an answer it did not foresee must not end the notebook, nor let it pass.
        pass_on = NotYet(
            "unexpected answer",
            f"The check could not make sense of this answer ({type(error).__name__}: {error}). "
            "Compare what your code returns with what the exercise asks for.",
            details="".join(traceback.format_exception(error)[-3:]),
        )
    else:
        return result(PASSED, "", checked=lab.checked)
    position = exercise.hint_for(pass_on.diagnosis)
    if position is not None:
        progress.note(exercise.name, hints=max(position + 1, progress.hints_seen(exercise.name)))
    return result(
        NOT_YET,
        pass_on.says,
        diagnosis=pass_on.diagnosis,
        tried=pass_on.tried,
        expected=pass_on.expected,
        got=pass_on.got,
        rank=pass_on.rank,
        details=pass_on.details,
        printed=printed_lines(lab.last.run.logs) if lab.last is not None else [],
        hint=exercise.hints[position] if position is not None else None,
    )
