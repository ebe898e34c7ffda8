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

parity: $(VENV)/.parity  ## compare with other projects' packages; their GPU kernels are interpreted, so no GPU is needed
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q -m 'parity or interpreter or cluster'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.base

# mamba-ssm's Python and Triton code without its CUDA code and that code's dependencies: it is built beside the PyTorch
# that it runs with, hence the tools for that and no isolation.
$(VENV)/.parity: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev,parity,lm,cluster]' setuptools wheel packaging ninja
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(PIP) --no-build-isolation --no-deps mamba-ssm
	touch $@ $(VENV)/.dev $(VENV)/.base

clean:
	rm -rf $(VENV) build *.egg-info
