# Everything runs in .venv, which each target makes if it is missing. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/fk_steering.py:small
WORKDIR ?= runs/$(basename $(notdir $(firstword $(subst :, ,$(CONFIG)))))
ARGS ?=
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export MPLBACKEND ?= agg

.PHONY: venv run test lint bench docs notebooks constraints clean

venv: $(VENV)/.core

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxml25 needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/python setup.cfg constraints.txt
	$(INSTALL) -e .
	touch $@

$(VENV)/.test: $(VENV)/.core
	$(INSTALL) -e '.[test]'
	touch $@

run: $(VENV)/.core
	$(BIN)/python experiments/launch.py --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=. $(BIN)/lint-imports --no-cache

docs: $(VENV)/.test
	$(BIN)/mkdocs build --strict --quiet

notebooks: $(VENV)/.test
	$(BIN)/pytest -q tests/notebooks_test.py

test: lint docs
	$(BIN)/pytest

bench: $(VENV)/.test
	for bench in benchmarks/bench_*.py; do $(BIN)/python $$bench || exit 1; done

# Resolves the versions anew, for every supported Python at once.
constraints: $(VENV)/.test
	$(INSTALL) uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-emit-package jaxml25 --no-header --no-annotate setup.cfg -o constraints.txt

clean:
	rm -rf $(VENV) .cache build site *.egg-info
