# make demo | test | test-slow | check | chaos | chaos-soak | studies | bench | docs | clean. Each target creates .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Programs that tests start load the package's bytecode: without it, each of them compiles the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow check chaos chaos-soak studies bench docs clean
.DELETE_ON_ERROR:

# pip would compile 29,000 modules, which takes half of the installation; Python compiles those that it imports.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ...")'
	[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[cpu,demo,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python jobs/demo.py configs/demo.yaml $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

# Two processes share the test files in order of collection, the long ones first. If one of them ends, so does the run:
# pytest-xdist can wait forever for a replacement.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# Files of tests stand in memory where it has 8 GB of room for them, and TMPDIR names no other place: to make and delete
# them takes a disk minutes.
HAS_ROOM := import os; m = os.statvfs("/dev/shm"); assert m.f_bavail * m.f_frsize >> 33 and not m.f_flag & os.ST_NOEXEC
IN_MEMORY = $(if $(TMPDIR),,$(shell $(BIN)/python -c '$(HAS_ROOM)' 2>/dev/null && echo TMPDIR=/dev/shm PYTEST_ADDOPTS=-otmp_path_retention_policy=failed))

test: $(STAMP) check
	$(IN_MEMORY) $(PYTEST) $(ARGS)

# Tests that need a Ray cluster or take long: killed commands, interrupted trainings, whole chains of stages.
test-slow: $(STAMP)
	$(IN_MEMORY) $(PYTEST) -m '(slow or ray) and not nodes' $(ARGS)

# Every fault of marker chaos, those of whole nodes too, and a table of the outcomes.
chaos: $(STAMP)
	$(BIN)/pytest -m 'chaos or nodes' --fault-table=benchmarks/results/faults.md $(ARGS)

# Histories of publishers, updaters and readers under faults, for hours: make chaos-soak SEEDS=0:10000
chaos-soak: $(STAMP)
	MVR_RAY_HISTORIES=$(SEEDS) $(PYTEST) -m chaos tests/histories $(ARGS)

# Every study at the size for two cores; finished steps are not run again. The four `decided` take hours to days on two
# cores, minutes on a GPU (docs/ranking.md). README.md names the data that they read.
studies: $(STAMP)
	$(BIN)/python benchmarks/base_model.py
	$(BIN)/mvr-ray study $(filter-out %/common.yaml %/common-camvr.yaml,$(wildcard configs/studies/*.yaml)) size=quick output=benchmarks/results/studies $(ARGS)

# Speed and memory against peers, each in an environment of its own under .peers/.
bench: $(STAMP)
	$(BIN)/python benchmarks/suite.py $(ARGS)

# The documentation as a site, in site/; a warning is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

clean:
	rm -rf .venv demo-store study-store site
