# make demo: the recordings in the package, looked at without a GPU. make test: everything, checked.
# Needs Python >= 3.11 with venv (Debian: python3-venv). Another Python: make demo PYTHON=python3.13
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
OUT ?= profiling-demo
# What `make test` hands to pytest, e.g. make test PYTEST_ARGS="--slow" or "-m gpu".
PYTEST_ARGS ?=
# Processes that share the tests, a file each at a time.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() or 1, 8))')
FBTRITON := $(shell sed -n 's/^fbtriton==//p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo install test lint types pytest format doctor notebooks clean

help:
	@echo "make demo     install the base package into $(VENV) and run the demo (no GPU, torch or Triton needed)"
	@echo "make test     install everything, then ruff, mypy and pytest (PYTEST_ARGS=…)"
	@echo "make install  install everything, run nothing"
	@echo "make lint     ruff     make types  mypy     make format  ruff format"
	@echo "make notebooks  run the notebooks and keep what they show (needs Chromium)"
	@echo "make doctor   say what works on this machine, and how to mend what does not"
	@echo "make clean    remove $(VENV) and what the tools leave behind"

demo: $(VENV)/.base
	$(BIN)/python -m profiling demo --out $(OUT)

install: $(VENV)/.all

test: lint types pytest

lint: $(VENV)/.all
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.all
	$(BIN)/mypy

pytest: $(VENV)/.all
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

format: $(VENV)/.all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.all
	$(BIN)/python notebooks/refresh.py

doctor: $(VENV)/.base
	$(BIN)/python -m profiling doctor

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist $(OUT)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' || \
	  { echo "Python >= 3.11 and < 3.15 is needed ($(PYTHON) is another, or missing): make $(MAKECMDGOALS) PYTHON=python3.13"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no venv module (Debian: apt-get install python3-venv)"; exit 1; }

# The base package only: neither torch nor Triton. An environment that has everything has the base.
$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(PIP) install --quiet --editable .
	@touch $@

# torch's CUDA builds bring PyPI's `triton`, which owns the same folder as fbtriton. Whichever was unpacked last, files of
# the other lie between its own and break it, so `triton` is removed and fbtriton put back, last.
$(VENV)/.all: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[kernels,notebooks,ncu,dev]'
	@if $(PIP) show --quiet fbtriton 2>/dev/null && $(PIP) show --quiet triton 2>/dev/null; then \
	  set -x; $(PIP) uninstall --quiet --yes triton; $(PIP) install --quiet --force-reinstall --no-deps fbtriton==$(FBTRITON); fi
	@touch $@ $(VENV)/.base
