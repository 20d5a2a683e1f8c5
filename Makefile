# Entry points. Everything is installed into .venv on first use and left alone afterwards.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: all demo test lint bench simulate peer-suite test-gpu clean

all: $(VENV)/.built

# torch first and by itself: without a pinned version pip takes a CUDA build of several GB.
$(VENV)/.torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q "$(TORCH)"
	touch $@

$(VENV)/.tools: $(VENV)/.torch requirements.txt
	$(BIN)/pip install -q -r requirements.txt
	touch $@

$(VENV)/.built: $(VENV)/.tools setup.py pyproject.toml $(shell find csrc python -name '*.cpp' -o -name '*.h' -o -name '*.py' -o -name '*.pyi')
	$(BIN)/pip install -q --no-build-isolation --no-deps .
	touch $@

$(VENV)/.test-tools: $(VENV)/.tools requirements-test.txt
	$(BIN)/pip install -q -r requirements-test.txt
	touch $@

demo: all
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/ddp_subgroups.py

test: all $(VENV)/.test-tools
	$(BIN)/python -m pytest

lint: all $(VENV)/.test-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc tests -name '*.cpp' -o -name '*.h')

bench: all $(VENV)/.test-tools
	$(BIN)/python benchmarks/bench.py

clean:
	rm -rf build $(VENV)/.built
