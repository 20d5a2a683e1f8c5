# Entry points. Everything is installed into .venv on first use and left alone afterwards.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: all demo test lint bench simulate soak peer-suite test-gpu clean

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

# The engine with simulated ranks: no torch, no MPI; always under the address and undefined-behaviour sanitizers.
comma := ,
SIM := build/sim
SIM_SOURCES := $(wildcard csrc/coordinator/*.cpp csrc/transport/sim/*.cpp) csrc/transport/mpi/buffer_pool.cpp
SIM_OBJECTS := $(patsubst csrc/%.cpp,$(SIM)/%.o,$(SIM_SOURCES))
SIM_FLAGS := -std=c++20 -O1 -g -Wall -Wextra -Werror -Wno-restrict -fsanitize=address,undefined -fno-sanitize-recover=all \
	-Icsrc -pthread
SEEDS ?= 2000
FIRST_SEED ?= 1

$(SIM)/%.o: csrc/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(SIM_FLAGS) -MMD -c $< -o $@

$(SIM)/tests/%.o: tests/cpp/%.cpp
	@mkdir -p $(@D)
	$(CXX) $(SIM_FLAGS) -MMD -c $< -o $@

$(SIM)/simulate $(SIM)/engine_test: $(SIM)/%: $(SIM)/tests/%.o $(SIM_OBJECTS)
	$(CXX) $(SIM_FLAGS) $^ -o $@

# The engine's threads (driver, completion, callers) under the thread sanitizer.
TSAN := build/tsan
TSAN_FLAGS := $(subst address$(comma)undefined,thread,$(SIM_FLAGS))
$(TSAN)/threads_test: tests/cpp/threads_test.cpp $(SIM_SOURCES) $(wildcard csrc/*/*.h csrc/*/*/*.h)
	@mkdir -p $(@D)
	$(CXX) $(TSAN_FLAGS) tests/cpp/threads_test.cpp $(SIM_SOURCES) -o $@

-include $(SIM_OBJECTS:.o=.d) $(wildcard $(SIM)/tests/*.d)
.PRECIOUS: $(SIM)/tests/%.o

simulate: $(SIM)/simulate
	$(SIM)/simulate $(FIRST_SEED) $(SEEDS)

demo: all
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/ddp_subgroups.py

# The second run holds Gloo to the same right results, where it has the operation.
test: all $(VENV)/.test-tools $(SIM)/simulate $(SIM)/engine_test $(TSAN)/threads_test
	$(BIN)/python -m pytest
	MULTICOMM_TEST_BACKEND=gloo $(BIN)/python -m pytest -q -p no:cacheprovider -r f tests/test_operations.py

lint: all $(VENV)/.test-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc tests -name '*.cpp' -o -name '*.h')

bench: all $(VENV)/.test-tools
	$(BIN)/python benchmarks/bench.py --plot build/bench/results.png

# Thousands of groups, made one after the other and all at once: what they leave behind. A minute or two.
soak: all $(VENV)/.test-tools
	MULTICOMM_TEST_SOAK=1 $(BIN)/python -m pytest tests/test_groups.py -k thousands

# torch's own distributed tests, which ship in its wheel: 4 to 8 seconds each. TESTS narrows them: TESTS="-k all_reduce"
peer-suite: all $(VENV)/.test-tools
	BACKEND=multicomm WORLD_SIZE=3 $(BIN)/python tests/peer_suite.py -v $(TESTS)

test-gpu:
	@echo "multicomm moves CPU tensors only so far: there is nothing to test on a GPU yet"; exit 1

clean:
	rm -rf build $(VENV)/.built
