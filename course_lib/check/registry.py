"""Which exercises there are: each with its title, its judge and its hints, found by name."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHAPTER = re.compile(r"^chapter(\d\d)$")
NAME = re.compile(r"^(\d{1,2})\.(\d{1,2})$")
LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Hint:
    """One hint. title: the symptom it is for. text: backticks set code.

    picture: a function without arguments that gives matplotlib axes, a figure or HTML; for the last hint.
    fits: the diagnoses for which a check shows this hint instead of the first.
    """

    title: str
    text: str
    picture: Callable[[], Any] | None = None
    fits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exercise:
    """One exercise. judge(lab, *answers) returns when all is well. limit: seconds for all of its jobs."""

    name: str
    title: str
    judge: Callable
    hints: tuple[Hint, ...]
    limit: float = LIMIT_SECONDS

    def hint_for(self, diagnosis: str) -> int | None:
        """The position of the hint that a check with this diagnosis shows; None where there are no hints."""
        for position, hint in enumerate(self.hints):
            if diagnosis in hint.fits:
                return position
        return 0 if self.hints else None


_exercises: dict[str, Exercise] = {}


def exercise(
    name: str, title: str, *, hints: tuple[Hint, ...], limit: float = LIMIT_SECONDS
) -> Callable[[Callable], Callable]:
    """Make the decorated function the judge of exercise `name`, such as "3.1"."""
    if not NAME.match(name):
        raise ValueError(f'an exercise is named by chapter and number, such as "3.1", not {name!r}')

    def register(judge: Callable) -> Callable:
        _exercises[name] = Exercise(name, title, judge, tuple(hints), limit)
        return judge

    return register


def all_exercises() -> list[Exercise]:
    """Every exercise of every chapter, in order."""
    import course_lib.check

    for module in pkgutil.iter_modules(course_lib.check.__path__):
        if CHAPTER.match(module.name):
            importlib.import_module(f"course_lib.check.{module.name}")
    return sorted(_exercises.values(), key=lambda e: tuple(map(int, e.name.split("."))))


def find(name: object) -> Exercise:
    """The exercise of this name. Raises ValueError, listing those there are."""
    if isinstance(name, float):
        name = str(name)
    if isinstance(name, str) and name not in _exercises and (match := NAME.match(name.strip())):
        name = name.strip()
        module = f"course_lib.check.chapter{int(match[1]):02d}"
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    if not isinstance(name, str) or name not in _exercises:
        known = ", ".join(e.name for e in all_exercises())
        raise ValueError(f"there is no exercise {name!r}. Those there are: {known}")
    return _exercises[name]
