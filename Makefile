# The commands of the README, and what continuous integration runs. Needs Python 3.10 or later only.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo figures calibration test test-all lint clean

demo: $(VENV)/ready
	$(BIN)/python -m kvbench +experiment=beam_search

# From the stored tables in results/reference; nothing is run.
figures: $(VENV)/ready
	$(BIN)/python -m paper_figures

calibration: $(VENV)/ready
	$(BIN)/python -m paper_figures.calibration

test: $(VENV)/ready
	$(BIN)/python -m pytest -n auto

test-all: $(VENV)/ready
	$(BIN)/python -m pytest -n auto -m "not gpu" --hypothesis-profile=thorough

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy kvbench allocators kernels paper_figures
	$(BIN)/lint-imports

# torch first and alone: its CPU build satisfies everything else, a later resolution could not replace it.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV)
