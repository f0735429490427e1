# make run, make test: each alone is enough on a bare clone.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup run test exhaustive quick check lint docs clean

setup: .venv/.installed

# The stamp is newer than what it was made from, so a second `make setup` does nothing.
.venv/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: setup
	@$(BIN)/parallel3d run configs/mesh-2x2x2.yaml

# These look at what the whole machine has: its memory, its processor time, its shared files.
ALONE := tests/fault $(addprefix tests/multiproc/test_,resources.py bench_collectives.py hosts.py bottlenecks.py)

test: setup
	$(BIN)/pytest tests $(ALONE:%=--ignore=%) -m 'not exhaustive' --numprocesses auto --dist worksteal
	$(BIN)/pytest $(ALONE) -m 'not exhaustive'

# What `make test` leaves out: more of the same, which takes long and seldom finds what the others don't.
exhaustive: setup
	$(BIN)/pytest tests $(ALONE:%=--ignore=%) -m exhaustive --numprocesses auto --dist worksteal
	$(BIN)/pytest $(ALONE) -m exhaustive

quick: setup
	$(BIN)/pytest tests -m 'not slow'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test exhaustive

docs: setup
	$(BIN)/parallel3d schema --markdown > docs/configuration.md

clean:
	rm -rf .venv build dist *.egg-info
