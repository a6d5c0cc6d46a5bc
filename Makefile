# `make solve` and `make test` need python 3.11 or later with pip, and nothing else.
# PYTHON=python3.12 chooses the interpreter (after `make clean`, if there is a .venv already);
# NUMBA_CACHE_DIR, where it is set, is passed on as it stands.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
STAMPS := pyproject.toml constraints.txt

EXAMPLE     ?= table3
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help solve test lint docs bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

solve: $(VENV)/.core  ## install, then solve one envelope: EXAMPLE=table3
	$(BIN)/mosaic solve --example $(EXAMPLE)

test: lint  ## install, then every check and every test: PYTEST_ARGS='-m "not slow"'
	$(BIN)/pytest -n auto --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.test  ## style, types and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs  ## build docs/_build/html; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: $(VENV)/.core  ## print the speed of this machine
	$(BIN)/python benchmarks/speed.py

clean:  ## remove the environment, the caches and what was built
	rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	    .import_linter_cache .grimp_cache
	find perfmodel lawfit moe_ref mosaic_opt tests docs -name __pycache__ -type d -prune \
	    -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "$(PYTHON) is older than 3.11: name a later one, as in  make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras; a stamp is stale when what it was installed from has changed.
$(VENV)/.core: $(STAMPS) | $(BIN)/python
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(STAMPS) | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[test,torch]'
	@touch $@ $(VENV)/.core

$(VENV)/.docs: $(STAMPS) | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $@ $(VENV)/.core
