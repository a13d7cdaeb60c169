"""Write exercises/ from solutions/: `make exercises`.

A solution marks what the learner is to write:

    def average(value):
        "The mean of `value` over all ranks."
        # BEGIN SOLUTION
        total = torch.tensor(value)
        ...
        # END SOLUTION

The region becomes `raise NotImplementedError("your code here")`. A region outside of any function, such as
`cap_mb = 2`, becomes `cap_mb = ...  # your answer here`. `check(…, strict=True)` loses its `strict=True`, so
that an untouched notebook runs; a line of the first cell that begins with "**Solutions.**" becomes the note
for learners. The same solutions always give the same exercises.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "# BEGIN SOLUTION", "# END SOLUTION"
STUB = 'raise NotImplementedError("your code here")'
SOLUTIONS_LINE = "**Solutions.**"
NOTE = (
    "Write your answers into the cells below, and run them. *(This notebook is made from "
    "[its solutions](../solutions/{name}) by `make exercises`, which leaves it alone once you have worked in "
    "it.)*"
)


def stubbed(source: str) -> str:
    """The source of a code cell without its solutions. Raises ValueError for marks that do not pair."""
    written: list[str] = []
    region: list[str] | None = None
    lines = source.split("\n")
    for number, line in enumerate(lines):
        mark = line.strip()
        if mark == BEGIN:
            if region is not None:
                raise ValueError(f"{BEGIN} inside a solution, after: {written[-1:]}")
            region, indent = [], line[: len(line) - len(line.lstrip())]
        elif mark == END:
            if region is None:
                raise ValueError(f"{END} without {BEGIN}")
            written += _stub(region, indent, written, "\n".join(lines[number:]))
            region = None
        elif region is not None:
            region.append(line)
        else:
            written.append(line)
    if region is not None:
        raise ValueError(f"{BEGIN} without {END}")
    return re.sub(r",\s*strict=True\s*\)", ")", "\n".join(written))


def _stub(region: list[str], indent: str, before: list[str], after: str) -> list[str]:
    """What stands in an exercise where the solution had `region`, between these lines and this text."""
    if not indent:
        names = [name for node in ast.parse("\n".join(region)).body for name in _assigned(node)]
        if not names:
            raise ValueError(f"a region outside of a function has to assign something: {region}")
        # What only the solution uses is not the learner's business.
        asked = [name for name in dict.fromkeys(names) if re.search(rf"\b{name}\b", after)]
        return [f"{name} = ...  # your answer here" for name in asked or names]
    block = next(
        (line for line in reversed(before) if line.strip() and not line.startswith(indent)), ""
    ).lstrip()
    if block.startswith("class "):
        raise ValueError(
            f"put the region inside a method: in the body of `{block}` the stub would raise at once"
        )
    return [indent + STUB]


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def exercise_of(solution: dict[str, Any], name: str) -> dict[str, Any]:
    """The exercise notebook of a solution notebook whose file is called `name`."""
    notebook = copy.deepcopy(solution)
    noted = False
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            source = stubbed(source)
            cell["outputs"], cell["execution_count"] = [], None
            cell["metadata"].pop("execution", None)
        elif cell["cell_type"] == "markdown" and not noted:
            noted = True
            kept = [line for line in source.split("\n") if not line.startswith(SOLUTIONS_LINE)]
            said = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).rstrip()
            source = f"{said}\n\n{NOTE.format(name=name)}"
        cell["source"] = source.splitlines(keepends=True)
    notebook["metadata"]["course_lib"] = {"written": fingerprint(notebook)}
    return notebook


def fingerprint(notebook: dict[str, Any]) -> str:
    """A hash of what the cells say: an exercise that still has the one it was written with is untouched."""
    said = [[cell["cell_type"], "".join(cell["source"])] for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def worked_in(path: Path) -> bool:
    """Whether somebody has changed the cells of this exercise since it was written."""
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        return notebook["metadata"]["course_lib"]["written"] != fingerprint(notebook)
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        return True


def text_of(notebook: dict[str, Any]) -> str:
    """A notebook as its file holds it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def write(root: Path = ROOT, force: bool = False) -> list[Path]:
    """Write every exercise anew but those that were worked in (`force`: those too); return what was kept."""
    kept = []
    (root / "exercises").mkdir(exist_ok=True)
    for solution in sorted((root / "solutions").glob("*.ipynb")):
        path = root / "exercises" / solution.name
        if worked_in(path) and not force:
            kept.append(path)
            continue
        notebook = json.loads(solution.read_text(encoding="utf-8"))
        path.write_text(text_of(exercise_of(notebook, solution.name)), encoding="utf-8")
    return kept


def main() -> None:
    """`python -m course_lib.exercises [--force]`."""
    for path in write(force="--force" in sys.argv[1:]):
        said = (
            f"kept {path.relative_to(ROOT)}: it holds somebody's answers. To write it anew, move it away, or "
            "run `make exercises FORCE=--force`, which loses them."
        )
        print(textwrap.fill(said, 100))


if __name__ == "__main__":
    main()
