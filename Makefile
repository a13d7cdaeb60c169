# `make lab` opens the workbook; `make test` runs everything. Both make .venv on their first call.
# PYTHON chooses the interpreter .venv is made from; it must be 3.10 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
# Passed on to JupyterLab, such as LAB_OPTIONS="--no-browser --port=9000".
LAB_OPTIONS ?=

.PHONY: lab test lint bench exercises html clean install

install: $(READY)

$(READY): pyproject.toml constraints.txt .jupyterlab-overrides.json
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and f"Python 3.10 or newer is needed, and {sys.executable} is {v.major}.{v.minor}. Try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "Python's venv module is missing. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	@mkdir -p $(VENV)/share/jupyter/lab/settings
	@cp .jupyterlab-overrides.json $(VENV)/share/jupyter/lab/settings/overrides.json
	@touch $(READY)

lab: $(READY)
	$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" \
		--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(LAB_OPTIONS)

test: $(READY)
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest --nbval-lax --nbval-cell-timeout=60 notebooks $(wildcard solutions/*.ipynb) -p no:cacheprovider

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Writes exercises/ from solutions/; FORCE=--force also those that hold answers.
exercises: $(READY)
	$(BIN)/python -m course_lib.exercises $(FORCE)

bench: $(READY)
	$(BIN)/python tests/benchmarks/run.py

html: $(READY)
	$(BIN)/jupyter nbconvert --to html --execute --output-dir build/html notebooks/*.ipynb

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache
