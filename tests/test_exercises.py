"""The exercise notebooks: made from their solutions, run untouched, and are left alone once worked in."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from course_lib import exercises
from course_lib.exercises import exercise_of, stubbed, text_of, worked_in, write

ROOT = Path(__file__).parents[1]
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
EXERCISES = sorted((ROOT / "exercises").glob("*.ipynb"))
RUN_SECONDS = 60


def code_cells(notebook: dict) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def checks_in(path: Path) -> list[str]:
    return re.findall(
        r'^check\("([\d.]+)"', "\n".join(code_cells(json.loads(path.read_text()))), re.MULTILINE
    )


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda path: path.stem)
def test_an_exercise_is_what_its_solution_makes_of_it(solution):
    made = text_of(exercise_of(json.loads(solution.read_text(encoding="utf-8")), solution.name))
    there = (ROOT / "exercises" / solution.name).read_text(encoding="utf-8")
    assert there == made, "run `make exercises` (after work on an exercise: in another clone)"


def test_every_exercise_has_a_solution():
    assert [path.name for path in EXERCISES] == [path.name for path in SOLUTIONS] and EXERCISES


@pytest.mark.parametrize("path", [*SOLUTIONS, *EXERCISES], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_exercise_notebook_holds_no_outputs_and_its_links_lead_somewhere(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", "".join(cell["source"])):
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("solution", SOLUTIONS, ids=lambda path: path.stem)
def test_a_solution_is_strict_so_that_running_it_proves_that_it_passes(solution):
    source = "\n".join(code_cells(json.loads(solution.read_text(encoding="utf-8"))))
    strict = re.findall(r'^check\("[\d.]+",[^\n]*strict=True\)', source, re.MULTILINE)
    assert len(strict) == len(checks_in(solution)) > 0


def run(notebook: dict, directory: Path) -> list[str]:
    """What each code cell showed as text, in a kernel of its own."""
    import nbclient
    import nbformat

    node = nbformat.reads(json.dumps(notebook), as_version=4)
    nbclient.NotebookClient(
        node, timeout=RUN_SECONDS, resources={"metadata": {"path": str(directory)}}
    ).execute()
    shown = []
    for cell in node.cells:
        if cell.cell_type == "code":
            parts = [output.get("data", {}).get("text/plain", "") for output in cell.outputs]
            shown.append("\n".join(parts))
    return shown


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_an_untouched_exercise_notebook_runs_and_says_that_nothing_was_attempted(path, tmp_path):
    shown = run(json.loads(path.read_text(encoding="utf-8")), tmp_path)
    for name in checks_in(path):
        assert any(text.startswith(f"Not attempted: {name} ") for text in shown), name
    assert not any(text.startswith(("Passed", "Not yet")) for text in shown)


def test_a_solved_exercise_shows_that_it_passed_and_keeps_the_progress(tmp_path):
    solved = json.loads((ROOT / "solutions" / "00_start_here.ipynb").read_text(encoding="utf-8"))
    for cell in solved["cells"]:
        cell["source"] = "".join(cell["source"]).replace(", strict=True", "")
    shown = run(solved, tmp_path)
    assert any(text.startswith("Passed: 0.1 ") for text in shown)
    assert json.loads((tmp_path / "progress.json").read_text())["exercises"]["0.1"]["outcome"] == "passed"


def test_a_region_becomes_a_stub_that_keeps_its_indentation():
    source = "def f(x):\n    # BEGIN SOLUTION\n    return x\n    # END SOLUTION\n\n\ncheck(f, strict=True)"
    expected = 'def f(x):\n    raise NotImplementedError("your code here")\n\n\ncheck(f)'
    assert stubbed(source) == expected


def test_a_region_outside_of_a_function_asks_for_the_names_that_are_used_after_it():
    source = "# BEGIN SOLUTION\nhelp = [1]\ncap_mb = help[0]\n# END SOLUTION\ncheck('4.3', cap_mb)"
    assert stubbed(source) == "cap_mb = ...  # your answer here\ncheck('4.3', cap_mb)"


@pytest.mark.parametrize(
    "source",
    [
        "# BEGIN SOLUTION\nx = 1",
        "x = 1\n# END SOLUTION",
        "# BEGIN SOLUTION\nprint(1)\n# END SOLUTION",
        "class A:\n    # BEGIN SOLUTION\n    x = 1\n    # END SOLUTION",
        "# BEGIN SOLUTION\n# BEGIN SOLUTION\nx = 1\n# END SOLUTION",
    ],
)
def test_marks_that_make_no_sense_are_refused(source):
    with pytest.raises(ValueError, match=r"SOLUTION|region"):
        stubbed(source)


def copy_of_00(tmp_path: Path) -> Path:
    (tmp_path / "solutions").mkdir()
    shutil.copy(ROOT / "solutions" / "00_start_here.ipynb", tmp_path / "solutions")
    assert write(tmp_path) == []
    return tmp_path / "exercises" / "00_start_here.ipynb"


def test_an_exercise_that_was_worked_in_is_not_written_over(tmp_path):
    path = copy_of_00(tmp_path)
    assert not worked_in(path)
    text = path.read_text().replace('raise NotImplementedError(\\"your code here\\")', "return value")
    path.write_text(text)
    assert write(tmp_path) == [path] and path.read_text() == text
    assert write(tmp_path, force=True) == [] and path.read_text() != text


def test_an_exercise_that_was_only_run_is_written_anew(tmp_path):
    path = copy_of_00(tmp_path)
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["execution_count"] = 1
    path.write_text(json.dumps(notebook))
    assert write(tmp_path) == [] and '"execution_count": 1' not in path.read_text()


def test_writing_twice_gives_the_same_file(tmp_path):
    path = copy_of_00(tmp_path)
    before = path.read_bytes()
    write(tmp_path)
    assert path.read_bytes() == before
    assert exercises.SOLUTIONS_LINE not in before.decode()
