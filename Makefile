PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 4
# every process of every test would compile torch again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-all quick test-vllm lint docs bench clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rollway needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[local,dev]'
	@touch $@

setup: $(READY)  ## Create .venv with everything rollway needs

demo: $(READY)  ## Train a tiny Mixture-of-Experts on reverse-text (a few minutes on 2 cores)
	$(BIN)/rollway train examples/reverse-text/run.toml --clean

test: lint  ## Lint, then run the tests, JOBS of them at a time (under eight minutes)
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m 'not long'

test-all: lint  ## The same, and whole systems whose subject has a shorter test too
	$(BIN)/pytest -n $(JOBS) --dist worksteal

quick: lint  ## Lint, then run all tests but those that start whole systems (under two minutes)
	$(BIN)/pytest -n $(JOBS) --dist worksteal -m 'not system'

test-vllm: $(READY)  ## Install vLLM for CPU in .venv-vllm, and run the tests on it (under 40 minutes)
	$(BIN)/python tools/install_vllm.py .venv-vllm
	$(BIN)/pytest tests_vllm

lint: $(READY)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## Write the pages of docs/ that are made from code
	$(BIN)/python docs/generate.py

bench: $(READY)  ## Run the benchmarks behind the README's numbers (FULL=1: the full sizes); a missed bar ends it
	@for bench in bench/*.py; do \
	  printf '\n== %s\n' "$$bench"; $(BIN)/python $$bench $(if $(FULL),--full) $(if $(STRICTNESS),--strictness $(STRICTNESS)) || exit 1; \
	done

clean:  ## Remove the venv, caches and all runs
	rm -rf $(VENV) .venv-vllm outputs build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
