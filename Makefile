PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint parity clean

demo: $(VENV)/.base  ## install, then train and evaluate a small Mamba-2 with PoST: minutes on two cores
	$(BIN)/bench niah --model mamba2 --post

test: $(VENV)/.dev  ## install with the test tools, then run the tests
	$(BIN)/python -m pytest -q

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

parity: $(VENV)/.parity  ## compare with other projects' packages
	$(BIN)/python -m pytest -q -m parity

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.base

$(VENV)/.parity: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev,parity]'
	touch $@ $(VENV)/.dev $(VENV)/.base

clean:
	rm -rf $(VENV) build *.egg-info
