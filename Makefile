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

# Tests without processes of their own on all cores; those with ranks one after the other, for they use all cores.
test: setup
	$(BIN)/pytest tests/unit --numprocesses auto --dist loadfile
	$(BIN)/pytest tests/multiproc tests/fault

quick: setup
	$(BIN)/pytest tests -m 'not slow' --numprocesses auto --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

docs: setup
	$(BIN)/parallel3d schema --markdown > docs/configuration.md

clean:
	rm -rf .venv build dist *.egg-info
