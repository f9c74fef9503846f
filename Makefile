# The commands of this project. Each sets itself up from a bare Python >= 3.10 in a
# .venv of its own, and does again only what changed. Building is in plugin/build.py.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# loadgroup: tests that share a costly fixture run in one process.
PYTEST := $(PY) -m pytest -n auto --dist loadgroup
SOURCES := jax_flash_metal plugin tests tools examples
# What holds on every platform that has the Metal kernels, run again where flash_metal is the
# default; plain jax.numpy (xla, fallback) is the same there, and the CPU kernels are not there.
CONTRACT := JAX_PLATFORMS=flash_metal,cpu $(PYTEST) @tests/contract.txt \
  -k "not xla and not cpu and not fallback"

.PHONY: help setup build test test-all jax-tests check-kernels sanitize coverage lint format \
  wheels demo clean

help: ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

setup: $(PY) ## the virtual environment with the project installed in it, editable
	@$(PY) tools/environments.py install

build: setup ## the native library, in the source tree
	@$(PY) -m plugin.build

check-kernels: setup ## the strict front end and the race checker over every kernel
	@$(PYTEST) tests/checker

sanitize: setup ## drivers of the plugin under the sanitizers of a system g++ or clang++
	@$(PY) -m tests.sanitize

coverage: setup ## lines of the Apple layer that its tests run, by a system compiler: all
	@$(PY) -m tests.sanitize --coverage

lint: setup ## ruff and mypy
	@$(PY) -m ruff check $(SOURCES)
	@$(PY) -m ruff format --check $(SOURCES)
	@$(PY) -m mypy

format: setup ## let ruff put the sources in order
	@$(PY) -m ruff check --fix $(SOURCES)
	@$(PY) -m ruff format $(SOURCES)

test: lint build ## lint, build and the tests, those of check-kernels among them
	@$(PYTEST) -m "not slow"
	@$(CONTRACT) -m "not slow"

test-all: lint build ## every test, the slow ones too, and every corner of JAX versions
	@$(PYTEST)
	@$(CONTRACT)
	@$(PY) tools/environments.py corners -n auto --dist loadgroup -m "not slow"

jax-tests: setup ## JAX's own tests on platform flash_metal, as docs/jax-tests.md says
	@$(PY) tools/environments.py run current tools/jax_tests.py $(if $(JAX),--source $(JAX))

wheels: setup ## wheels for Linux x86-64 and aarch64 and for macOS arm64, in dist/
	@for target in linux-x86_64 linux-aarch64 macos-arm64; do \
	  JAX_FLASH_METAL_TARGET=$$target $(PY) -m pip wheel -qq --disable-pip-version-check \
	    --no-deps --no-build-isolation --wheel-dir dist . || exit 1; \
	done
	@ls dist

demo: build ## train a small transformer, then compare memory
	@$(PY) examples/train_gpt.py
	@$(PY) examples/compare_memory.py

clean: ## remove what was built; the environments stay
	rm -rf build dist jax_flash_metal/_native
