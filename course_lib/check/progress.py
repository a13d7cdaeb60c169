"""What a learner has done so far, kept in `progress.json` where the notebook runs, and its report.

The file is a convenience: where it cannot be written or read, checks go on without it. The environment
variable COURSE_LIB_PROGRESS names another file.
"""

from __future__ import annotations

import contextlib
import datetime
import html
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from course_lib.check.registry import Exercise
from course_lib.check.result import NOT_ATTEMPTED, PASSED

VARIABLE = "COURSE_LIB_PROGRESS"
_memory: dict[str, dict[str, Any]] = {}


def file() -> Path:
    """Where progress is kept."""
    return Path(os.environ.get(VARIABLE) or "progress.json")


def load() -> dict[str, dict[str, Any]]:
    """All that is known, by exercise. A file that is missing or spoilt counts as empty."""
    try:
        rows = json.loads(file().read_text(encoding="utf-8"))["exercises"]
        return {name: row for name, row in rows.items() if isinstance(row, dict)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {name: dict(row) for name, row in _memory.items()}


def note(name: str, **changes: Any) -> None:
    """Keep these facts about an exercise. Never raises."""
    rows = load()
    rows.setdefault(name, {}).update(changes)
    _memory.setdefault(name, {}).update(changes)
    with contextlib.suppress(OSError):
        _write(json.dumps({"version": 1, "exercises": dict(sorted(rows.items()))}, indent=1) + "\n")


def _write(text: str) -> None:
    """Replace the file at once: a kernel killed half way leaves the old one."""
    path = file()
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".progress.")
    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def note_outcome(name: str, outcome: str, diagnosis: str) -> None:
    """Keep the outcome of a check. A pass stays a pass; looking at a stub is no try."""
    row = load().get(name, {})
    changes: dict[str, Any] = {"outcome": outcome, "diagnosis": diagnosis}
    if outcome != NOT_ATTEMPTED:
        changes["tries"] = _count(row, "tries") + 1
    elif row.get("outcome"):
        return
    if outcome == PASSED and not row.get("passed"):
        changes["passed"] = datetime.datetime.now().isoformat(timespec="minutes")
    note(name, **changes)


def hints_seen(name: str) -> int:
    """How many hints of an exercise have been shown."""
    return _count(load().get(name, {}), "hints")


def _count(row: dict[str, Any], key: str) -> int:
    value = row.get(key, 0)
    return value if isinstance(value, int) and value > 0 else 0


class Report:
    """All exercises and what came of each. Shows itself; `save` writes it as text to hand in."""

    def __init__(self, exercises: Sequence[Exercise], who: str = "") -> None:
        known = load()
        self.who = who
        self.rows: list[dict[str, Any]] = []
        for exercise in exercises:
            row = known.get(exercise.name, {})
            passed = str(row.get("passed") or "")
            self.rows.append(
                {
                    "name": exercise.name,
                    "title": exercise.title,
                    "outcome": PASSED if passed else str(row.get("outcome") or NOT_ATTEMPTED),
                    "diagnosis": "" if passed else str(row.get("diagnosis") or ""),
                    "tries": _count(row, "tries"),
                    "hints": min(_count(row, "hints"), len(exercise.hints)),
                    "passed": passed.replace("T", " "),
                }
            )

    def _headline(self) -> str:
        passed = sum(row["outcome"] == PASSED for row in self.rows)
        whose = f" ({self.who})" if self.who else ""
        return f"{passed} of {len(self.rows)} exercises passed{whose}"

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row["name"],
                row["title"],
                row["outcome"] + (f" ({row['diagnosis']})" if row["diagnosis"] else ""),
                str(row["tries"] or ""),
                str(row["hints"] or ""),
                row["passed"],
            )
            for row in self.rows
        ]

    def __repr__(self) -> str:
        table = [("", "exercise", "outcome", "tries", "hints", "passed on"), *self._cells()]
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in table
        ]
        return "\n".join([self._headline(), "", *(line.rstrip() for line in lines)])

    def _repr_html_(self) -> str:
        cell = "style='text-align:left; padding:2px 12px 2px 0'"
        head = "".join(
            f"<th {cell}>{n}</th>" for n in ("", "exercise", "outcome", "tries", "hints", "passed on")
        )
        rows = "".join(
            "<tr>" + "".join(f"<td {cell}>{html.escape(text)}</td>" for text in row) + "</tr>"
            for row in self._cells()
        )
        return f"<div><b>{html.escape(self._headline())}</b></div><table><tr>{head}</tr>{rows}</table>"

    def save(self, path: str | Path = "report.txt") -> Path:
        """Write the report as text, and return where."""
        path = Path(path)
        path.write_text(f"{self!r}\n", encoding="utf-8")
        return path
