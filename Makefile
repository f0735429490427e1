# make run, make test: each alone is enough on a bare clone.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup tools run test exhaustive quick check lint docs clean

setup: .venv/.installed

# The stamp is newer than what it was made from, so a second `make setup` does nothing.
.venv/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# What tests need of Debian: installed as root where there is apt-get, else those tests are left out.
tools: setup
	@$(BIN)/python -m tests.support.tools install

run: setup
	@$(BIN)/parallel3d run configs/mesh-2x2x2.yaml

# These look at what the whole machine has: its memory, its processor time, its shared files.
ALONE := tests/fault $(addprefix tests/multiproc/test_,resources.py bench_collectives.py hosts.py bottlenecks.py)

LEFT_OUT := .venv/left-out

# The fast tier first. The last line says what was left out for want of which tools, and is missing when nothing was.
define TIERS
	@rm -f $(LEFT_OUT)
	$(BIN)/pytest tests/unit -m '$(1)' --left-out $(LEFT_OUT) --numprocesses auto --dist worksteal
	$(BIN)/pytest tests/multiproc tests/ui $(ALONE:%=--ignore=%) -m '$(1)' --left-out $(LEFT_OUT) --numprocesses auto --dist worksteal
	$(BIN)/pytest $(ALONE) -m '$(1)' --left-out $(LEFT_OUT)
	@$(BIN)/python -m tests.support.tools report $(LEFT_OUT)
endef

test: tools
	$(call TIERS,not exhaustive)

# What `make test` leaves out: more of the same, which takes long and seldom finds what the others don't.
exhaustive: tools
	$(call TIERS,exhaustive)

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
