# Fornax: `make quickstart` runs the main job, `make test` the tests. Both set up .venv first.
# Variables: PYTHON (3.11 or newer), ARGS (passed to the quickstart), PYTEST_ARGS.

comma := ,
PYTHON ?= python3
VENV := .venv
PARITY := .venv-parity
VLLM := .venv-vllm
TPU := .venv-tpu
NEWEST := .venv-newest
BIN := $(VENV)/bin
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS ?=
PYTEST_ARGS ?=
# Images of containers often keep Python from writing bytecode: each process of the tests would
# compile every test and source from scratch.
unexport PYTHONDONTWRITEBYTECODE
PYTHON_NEWEST ?= python3.13
# The first that runs: pyenv's shim on PATH may stand for a version that is not enabled.
NEWEST_FOUND = $(shell for p in "$$(command -v $(PYTHON_NEWEST))" "$$HOME"/.pyenv/versions/*/bin/$(PYTHON_NEWEST); do \
  "$$p" -c 'import venv' 2>/dev/null && echo "$$p" && break; done)
# What a new jax breaks first: meshes, optimizers, the step, export, native kernels. By hand, more:
# make newest-test NEWEST_TESTS="tests/numerics tests/unit"
# The grouped products are among them for Tokamax, which needs that Python.
NEWEST_TESTS := $(addprefix tests/unit/,export kernels mesh optim train/test_step.py train/test_rewind.py) tests/device/test_kernels.py::test_grouped_products
# Device tests: on a GPU, or with DEVICE=cpu small and interpreted. They run in $(PYTHON) as it is
# where that holds all they need (a borrowed machine without a network), else in .venv.
DEVICE ?= gpu
DEVICE_NEEDS := import fornax.cli.main, fornax.train, fornax.tune, fornax.llm, fornax.serving, grain, array_record, fastapi, httptools, orjson, uvicorn, llguidance, pytest, hypothesis
ifneq (,$(filter device-%,$(MAKECMDGOALS)))
ifeq ($(origin DEVICE_PYTHON),undefined)
DEVICE_PYTHON := $(shell PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -c '$(DEVICE_NEEDS)' 2>/dev/null && echo $(PYTHON) || echo $(BIN)/python)
endif
endif
DEVICE_PLATFORMS := $(if $(filter gpu,$(DEVICE)),cuda$(comma)cpu,cpu)
DEVICE_RUN = PYTHONPATH=src:$$PYTHONPATH DEVICE=$(DEVICE) JAX_PLATFORMS=$(DEVICE_PLATFORMS) XLA_PYTHON_CLIENT_PREALLOCATE=false $(DEVICE_PYTHON)

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all test-exhaustive newest-test lint format proto parity tpu-test vllm-test bench kernel-bench compare-step wheel device-test device-bench device-python release docs docs-serve examples environments clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: $(VENV)/.base ## Set up .venv with Fornax in it

quickstart: $(VENV)/.base ## Set up, then take raw text to a tuned, served model (ARGS="--size tiny")
	$(BIN)/fornax quickstart $(ARGS)

test: $(VENV)/.dev ## Set up, then run the tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not device and not slow and not tpu and not exhaustive" --ignore=tests/parity --ignore=tests/vllm --ignore=tests/device $(PYTEST_ARGS)

test-all: $(VENV)/.dev ## The tests, the slow ones included
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not device and not tpu and not exhaustive" --ignore=tests/parity --ignore=tests/vllm $(PYTEST_ARGS)

test-exhaustive: $(VENV)/.dev ## The tests that take minutes, which CI leaves out
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "exhaustive and not device and not tpu" --ignore=tests/parity --ignore=tests/vllm $(PYTEST_ARGS)

newest-test: ## The fast tests that touch jax, on the newest Python and jax (PYTHON_NEWEST)
	@if [ -z "$(NEWEST_FOUND)" ]; then \
	  echo "newest-test is skipped: no $(PYTHON_NEWEST) on PATH or under ~/.pyenv; install it, or set PYTHON_NEWEST=/path/to/python"; \
	else $(MAKE) --no-print-directory $(NEWEST)/.ready && \
	  $(NEWEST)/bin/python -m pytest -n 2 --dist worksteal -m "not device and not slow and not tpu and not exhaustive" $(NEWEST_TESTS) $(PYTEST_ARGS); fi

lint: $(VENV)/.dev ## Style, types, import contracts, words of prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports
	$(BIN)/python tools/prose.py

format: $(VENV)/.dev ## Rewrite files in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: ## Make the descriptor and the types of gRPC's messages from their .proto file
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python $(PIP) 'grpcio-tools>=1.78,<2'
	cd src/fornax/serving/grpc && $(CURDIR)/.venv-proto/bin/python -m grpc_tools.protoc -I. \
	  --descriptor_set_out=inference.binpb --pyi_out=. inference.proto

parity: $(PARITY)/.ready ## Compare with torch and transformers, in their own environment (all: PYTEST_ARGS='-m ""')
	$(PARITY)/bin/python -m pytest -n 2 --dist worksteal -m "not exhaustive" tests/parity $(PYTEST_ARGS)

tpu-test: $(TPU)/.ready ## Compile with the real TPU compiler, in its own environment (all: PYTEST_ARGS='-m tpu')
	JAX_DISABLE_MOST_OPTIMIZATIONS=false $(TPU)/bin/python -m pytest -n 2 --dist worksteal -m "tpu and not exhaustive" --ignore=tests/parity --ignore=tests/vllm $(PYTEST_ARGS)

vllm-test: $(VLLM)/.ready ## Run inside real vLLM, in an environment of its own
	$(VLLM)/bin/python -m pytest tests/vllm -o filterwarnings=default $(PYTEST_ARGS)

device-test: device-python ## On a machine with a GPU: train, serve, tune, host and every kernel (DEVICE=cpu: small)
	$(DEVICE_RUN) -m pytest tests/device -o filterwarnings=default -p no:cacheprovider -q $(if $(filter gpu,$(DEVICE)),--record) $(PYTEST_ARGS)

device-bench: device-python ## On a machine with a GPU: MFU, decode bandwidth, peers (DEVICE=cpu: small)
	$(DEVICE_RUN) benchmarks/device/bench.py $(ARGS)

device-python:
	@if [ "$(DEVICE_PYTHON)" = "$(BIN)/python" ]; then $(MAKE) $(VENV)/.dev $(if $(filter gpu,$(DEVICE)),$(VENV)/.cuda); fi

$(VENV)/.cuda: $(VENV)/.base
	$(BIN)/python $(PIP) -e '.[cuda]'
	@touch $@

bench: $(PARITY)/.ready ## All benchmarks beside their peers; results in benchmarks/results
	$(PARITY)/bin/python benchmarks/train_step.py
	$(PARITY)/bin/python benchmarks/moe_step.py
	$(PARITY)/bin/python benchmarks/data_pipeline.py
	$(PARITY)/bin/python benchmarks/checkpoint.py
	$(PARITY)/bin/python benchmarks/trainer_overhead.py

kernel-bench: $(VENV)/.dev ## Every kernel: time, share of the limit, error; fails where the last run was better
	$(BIN)/python benchmarks/kernels.py $(ARGS)

compare-step: $(VENV)/.dev ## The training step here and at a base: FLOPs, bytes, time (BASE=main; all else: ARGS)
	$(BIN)/python benchmarks/compare_step.py $(if $(BASE),--base $(BASE)) $(ARGS)

wheel: $(VENV)/.dev ## Build a wheel in dist/ with the native kernels compiled (x86-64 Linux)
	rm -rf build/wheel
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(BIN)/python -m pip wheel --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation -w build/wheel .
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair -w dist build/wheel/*.whl

release: $(VENV)/.dev $(VENV)/.docs ## Check, test, build and tag a release, upload nothing (VERSION; DRY=1: no tests, no tag)
	$(BIN)/python .ci/release.py $(if $(VERSION),--version $(VERSION)) $(if $(DRY),--dry)

docs: $(VENV)/.docs ## Build the documentation into site/
	$(BIN)/python -m fornax.cli.reference docs/reference
	$(BIN)/python docs/house.py
	$(BIN)/python docs/stability.py
	$(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/.docs ## Serve the documentation on 127.0.0.1:8001
	$(BIN)/python -m fornax.cli.reference docs/reference
	$(BIN)/python docs/stability.py
	$(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001

examples: $(VENV)/.base ## Run every example and notebook, two at a time
	@$(MAKE) --no-print-directory -j2 --output-sync=target $(addprefix run-,$(wildcard examples/[0-9]*.py examples/notebooks/*.ipynb))

run-examples/%.py:
	$(BIN)/python examples/$*.py

run-examples/notebooks/%.ipynb:
	$(BIN)/python examples/notebooks/run.py examples/notebooks/$*.ipynb

environments: $(PARITY)/.ready $(TPU)/.ready $(if $(NEWEST_FOUND),$(NEWEST)/.ready) ## Set up those that parity, tpu-test and newest-test use

clean: ## Remove the environments and what tools left behind
	rm -rf $(VENV) $(PARITY) $(TPU) $(NEWEST) $(VLLM) .venv-proto $(PEERS) site .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Fornax needs Python 3.11 or newer and '$(PYTHON)' is older or missing; run: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python $(PIP) -e '.[serve,tune]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python $(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(BIN)/python $(PIP) -e '.[docs]'
	@touch $@

$(PARITY)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python $(PIP) -e '.[dev,parity]'
	@touch $@

$(TPU)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TPU)
	$(TPU)/bin/python $(PIP) -e '.[dev,tpu]'
	@touch $@

$(NEWEST)/.ready: pyproject.toml constraints.txt
	"$(NEWEST_FOUND)" -m venv $(NEWEST)
	$(NEWEST)/bin/python $(PIP) -e '.[dev]'
	@touch $@

# vLLM bounds some packages lower than constraints.txt pins them.
$(VLLM)/.ready: pyproject.toml constraints.txt tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	grep -vE '^(compressed-tensors|fastapi|llguidance|numpy|torch|transformers)==' constraints.txt > $(VLLM)/constraints.txt
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c $(VLLM)/constraints.txt \
	  -r tests/vllm/requirements.txt -e .
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'vllm==0.33.*' xgrammar==0.2.8
	@touch $@

include benchmarks/peers.mk
