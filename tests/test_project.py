"""What a reader of the project relies on: notebooks without stored outputs, a README that is true."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MODULES = sorted((ROOT / "course_lib").rglob("*.py"))


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_outputs(path):
    for cell in code_cells(path):
        if "NBVAL_CHECK_OUTPUT" not in "".join(cell["source"]):
            assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_keeps_to_its_measure(path):
    cells = code_cells(path)
    folded = [cell for cell in cells if cell["metadata"].get("jupyter", {}).get("source_hidden")]
    assert len(cells) - len(folded) <= 25
    assert max(len(cell["source"]) for cell in cells) <= 20


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_is_one_idea_of_at_most_300_lines_and_says_which(path):
    source = path.read_text()
    assert len(source.splitlines()) <= 300
    assert ast.get_docstring(ast.parse(source))


def test_links_in_the_readme_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_in_a_notebook_lead_somewhere(path):
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            for target in re.findall(r"\]\((?!http)([^)#]+)\)", "".join(cell["source"])):
                assert (path.parent / target).exists(), target


def test_the_readmes_example_runs():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", code[1]], check=True, cwd=ROOT, timeout=60)


def test_every_make_target_that_the_readme_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"(?:`|^    )make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"lab", "test"} <= set(named) <= targets


def test_importing_the_library_imports_no_torch_and_starts_nothing():
    code = (
        "import sys, threading, course_lib, course_lib.launch;"
        "assert 'torch' not in sys.modules; assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
