# Everything runs in an environment that the targets make when it is missing. PYTHON chooses the interpreter, 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
CONFIG ?= configs/fk_steering.py:small
WORKDIR ?= runs/$(basename $(notdir $(firstword $(subst :, ,$(CONFIG)))))
ARGS ?=
BIN := $(VENV)/bin
export MPLBACKEND ?= agg
export NO_MKDOCS_2_WARNING = 1

# uv installs in a fraction of pip's time; where it cannot reach an index that pip is configured for, pip does the work.
define install
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt $(1) || \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(1)
endef

.PHONY: venv run test lint bench docs notebooks constraints clean

venv: $(VENV)/.core

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit("jaxml25 needs Python 3.11 or newer: set PYTHON" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(VENV)/.core: $(BIN)/uv setup.cfg constraints.txt
	$(call install,-e .)
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(call install,-e '.[test]')
	@touch $@

run: $(VENV)/.core
	$(BIN)/python experiments/launch.py --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHONPATH=. $(BIN)/lint-imports --no-cache

docs: $(VENV)/.test
	$(BIN)/mkdocs build --strict --quiet

notebooks: $(VENV)/.test
	$(BIN)/pytest -n 0 tests/notebooks_test.py

test: lint docs
	$(BIN)/pytest

$(PEERS)/.done: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

bench: $(VENV)/.test $(PEERS)/.done
	for bench in benchmarks/bench_*.py; do $(BIN)/python $$bench || exit 1; done

# Resolves the versions anew, for every supported Python at once.
constraints: $(VENV)/.test
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra test --no-header --no-annotate setup.cfg -o constraints.txt

clean:
	rm -rf $(VENV) $(PEERS) .cache build site *.egg-info
