# make run, make test: each alone is enough on a bare clone.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup run test quick check lint docs clean

setup: .venv/.installed

# The stamp is newer than what it was made from, so a second `make setup` does nothing.
.venv/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: setup
	@$(BIN)/parallel3d run configs/mesh-2x2x2.yaml

# These look at what the whole machine has: its memory, its processor time, its shared files.
ALONE := tests/fault tests/multiproc/test_resources.py tests/multiproc/test_bench_collectives.py tests/multiproc/test_hosts.py

test: setup
	$(BIN)/pytest tests $(ALONE:%=--ignore=%) --numprocesses auto --dist loadfile
	$(BIN)/pytest $(ALONE)

quick: setup
	$(BIN)/pytest tests -m 'not slow'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

docs: setup
	$(BIN)/parallel3d schema --markdown > docs/configuration.md

clean:
	rm -rf .venv build dist *.egg-info
