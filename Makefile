# Two commands matter: `make demo` and `make test`. Each sets up what it needs first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# uv keeps what it downloads in the home directory, where it may write there.
UV := $(BIN)/uv $(shell test -w "$$HOME" || echo --no-cache)
# Where a machine forbids it, every process would compile all it imports again.
export PYTHONDONTWRITEBYTECODE :=
# Tests wait for servers and timers half of the time, so two processes share a core.
JOBS ?= $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN))))

.PHONY: help setup demo up test check quick tests test-system soak models lock dist clean

help:  ## This list.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(READY): requirements.lock requirements-setup.lock pyproject.toml
	@echo "Setting up .venv (once; a few seconds) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Rota needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-setup.lock
	@$(UV) pip install -q --python $(BIN)/python --require-hashes -r requirements.lock
	@$(UV) pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

setup: $(READY)  ## Make .venv with everything Rota needs.

demo: $(READY)  ## Start the stack, run a small workload to the end, stop.
	@$(BIN)/rota demo

up: $(READY)  ## Start Rota on this machine and stay up until Ctrl-C.
	@$(BIN)/rota up

test: $(READY)  ## Everything CI runs: the gates, then the suite.
	@$(BIN)/python -m tests.gates all
	@$(MAKE) --no-print-directory tests

check: $(READY)  ## Lint, types, layers, sizes, lock and secrets: seconds, before each commit.
	@$(BIN)/python -m tests.gates

quick: $(READY)  ## Unit, property and contract tests: a minute, while you work.
	@$(BIN)/python -m pytest -n $(JOBS) tests/unit tests/property tests/contract $(ARGS)

tests: $(READY)  ## The suite alone (JOBS processes; ARGS are given to pytest).
	@$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-system: $(READY)  ## The suite on this machine's own PostgreSQL and redis-server.
	@TEST_SERVERS=system $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

soak: $(READY)  ## What takes hours: soaks, chaos, every property with its full number of examples.
	@$(BIN)/python -m pytest -n 0 -m soak --timeout 3600 $(ARGS)
	@ROTA_TEST_EFFORT=full $(BIN)/python -m pytest -n $(JOBS) --timeout 3600 tests/property tests/chaos \
	  tests/integration/server/test_events.py tests/integration/server/test_schema.py tests/integration/engine/test_server_answers.py tests/acceptance/test_pipeline.py $(ARGS)

models: $(READY)  ## Check the protocols in models/ with spin (a notice where it is absent).
	@$(BIN)/python models/run.py $(ARGS)

lock: $(READY)  ## Resolve the dependencies anew (no address is recorded).
	@$(UV) lock -q --upgrade
	@$(UV) export -q --frozen --all-extras --group dev --no-emit-project --no-header --no-annotate -o requirements.lock
	@$(UV) export -q --frozen --only-group setup --no-emit-project --no-header --no-annotate -o requirements-setup.lock

dist: $(READY)  ## Build the wheel and the sdist, check them, and measure what each extra installs.
	@$(BIN)/python -m tools.distribution

clean:  ## Remove what the above made, the local data directory of the demo too.
	@rm -rf .venv .rota dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
