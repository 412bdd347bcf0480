# Everything from nothing: `make demo` and `make test` create .venv, build the core and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(wildcard src/mainstem/core/csrc/*)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo serve test lint bench stub clean
help:
	@echo "make demo    answer real prompts with a real model, cold and from the cache"
	@echo "make serve   an OpenAI-compatible server on 127.0.0.1:8000"
	@echo "make test    set up, lint, check types and run the tests"
	@echo "make bench   run the benchmarks, tables and JSON (ARGS=--quick for a short run)"

$(BIN)/python:
	@echo "Setting up $(VENV): the core is built and PyTorch installed, which takes some minutes the first time."
	@$(PYTHON) -m venv $(VENV)

# The second prerequisite list is why an edit of the core rebuilds it.
$(VENV)/server: $(BIN)/python pyproject.toml constraints.txt CMakeLists.txt $(CORE)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[server]'
	@touch $@

$(VENV)/dev: $(VENV)/server
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/server
	$(BIN)/mainstem demo $(ARGS)

serve: $(VENV)/server
	$(BIN)/mainstem serve $(ARGS)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CORE) tests/native/*.cpp

test: lint
	$(BIN)/pytest --numprocesses auto $(ARGS)

bench: $(VENV)/dev
	$(BIN)/python -m bench $(ARGS)

stub: $(VENV)/dev
	$(BIN)/python -m nanobind.stubgen -q -m mainstem._core -o src/mainstem/_core.pyi

clean:
	rm -rf $(VENV) build dist
