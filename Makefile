# Entry points. Everything is installed into .venv on first use and left alone afterwards.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: all demo test lint bench simulate scale fuzz fuzz-targets soak peer-suite test-gpu bench-gpu clean

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
SIM_FLAGS := -std=c++20 -DMULTICOMM_PLANTED_FAULTS -O1 -g -Wall -Wextra -Werror -Wno-restrict -fsanitize=address,undefined -fno-sanitize-recover=all \
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

# The launch order over real MPI, with a device double; run by mpirun on 4 ranks.
ORDER_TEST := build/mpi/order_test
ORDER_SOURCES := tests/cpp/order_test.cpp $(wildcard csrc/coordinator/*.cpp) \
	$(addprefix csrc/transport/mpi/,requests.cpp mpi_types.cpp control_plane.cpp)
$(ORDER_TEST): $(VENV)/.tools tests/cpp/device_double.h $(ORDER_SOURCES) $(wildcard csrc/*/*.h csrc/*/*/*.h)
	@mkdir -p $(@D)
	OMPI_CXX=$(CXX) $(BIN)/mpicxx -std=c++20 -O2 -g -Wall -Wextra -Werror -Wno-restrict -DOMPI_SKIP_MPICXX -Icsrc -Itests/cpp -pthread \
		$(ORDER_SOURCES) -o $@ -Wl,-rpath,$(abspath $(VENV))/lib

# The simulated accelerator, for torch to load.
DEVICE := build/device/libsimulated_device.so
TORCH_FLAGS := import torch; from torch.utils import cpp_extension as c; \
	print(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", *(f"-isystem {p}" for p in c.include_paths()), \
	*(f"-L{p} -Wl,-rpath,{p}" for p in c.library_paths()))
$(DEVICE): tests/device/simulated_device.cpp tests/device/runtime.h tests/device/stream.h $(VENV)/.tools
	@mkdir -p $(@D)
	$(CXX) -std=c++20 -O2 -g -fPIC -shared -Wall -Wextra -Werror -pthread tests/device/simulated_device.cpp -o $@ \
		$$($(BIN)/python -c '$(TORCH_FLAGS)') -ltorch_cpu -lc10

DEVICE_MPI := build/device/libdevice_mpi.so
$(DEVICE_MPI): tests/device/device_mpi.c
	@mkdir -p $(@D)
	$(CC) -fPIC -shared $< -o $@

# A double of NCCL for machines without GPUs; nccl_abi.cpp is not of it, see there.
NCCL_DOUBLE := build/device/libnccl_double.so
NCCL_DOUBLE_SOURCES := $(filter-out %/nccl_abi.cpp,$(wildcard tests/device/nccl_*.cpp))
$(NCCL_DOUBLE): $(NCCL_DOUBLE_SOURCES) $(wildcard tests/device/nccl_*.h) tests/device/stream.h
	@mkdir -p $(@D)
	$(CXX) -std=c++20 -O2 -g -Wall -Wextra -Werror -fPIC -shared -fvisibility=hidden -pthread $(NCCL_DOUBLE_SOURCES) -o $@

-include $(SIM_OBJECTS:.o=.d) $(wildcard $(SIM)/tests/*.d)
.PRECIOUS: $(SIM)/tests/%.o

# FAST=1: without the sanitizers, for very many seeds.
FAST_SIMULATE := build/fast/simulate
$(FAST_SIMULATE): tests/cpp/simulate.cpp $(SIM_SOURCES) $(wildcard csrc/*/*.h csrc/*/*/*.h)
	@mkdir -p $(@D)
	$(CXX) $(patsubst -O1,-O2,$(filter-out -fsanitize% -fno-sanitize%,$(SIM_FLAGS))) tests/cpp/simulate.cpp $(SIM_SOURCES) -o $@

SIMULATE := $(if $(FAST),$(FAST_SIMULATE),$(SIM)/simulate)
simulate: $(SIMULATE)
	$(SIMULATE) $(FIRST_SEED) $(SEEDS)

# Fuzz targets, by coverage (libFuzzer) with the first clang that has it; else with the compiler at hand and a driver
# that mutates blindly. SRC: another tree of sources; the tests break one on purpose.
FUZZ := build/fuzz
SRC := csrc
SECONDS := 60
FUZZ_CLANG = $(eval FUZZ_CLANG := $(shell for c in clang++ clang++-20 clang++-19 clang++-18 clang++-17 clang++-16 \
	clang++-15 clang++-14; do echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' | \
	$$c -x c++ -fsanitize=fuzzer - -o /dev/null 2>/dev/null && echo $$c && break; done))$(FUZZ_CLANG)
FUZZ_CXX = $(or $(FUZZ_CLANG),$(CXX))
FUZZ_FLAGS = $(subst $(comma)undefined,$(comma)undefined$(if $(FUZZ_CLANG),$(comma)fuzzer-no-link),\
	$(subst -Icsrc,-I$(SRC),$(filter-out -Wno-restrict,$(SIM_FLAGS))) $(if $(FUZZ_CLANG),,-Wno-restrict))
FUZZ_TARGETS := $(patsubst tests/fuzz/%.cpp,%,$(filter-out %/standalone.cpp,$(wildcard tests/fuzz/*.cpp)))
FUZZ_OF_record := $(addprefix coordinator/,inline_payload names received record reduce_kernels types)
FUZZ_OF_settings := coordinator/settings
FUZZ_OF_node_config := bootstrap/pmix_server/job_info
FUZZ_OF_introductions := $(addprefix bootstrap/,host_identity introductions start_agreement)
FUZZ_OF_relay := bootstrap/relay
FUZZ_OF_rank_watch := bootstrap/pmix_server/rank_watch
FUZZ_OBJECTS := $(foreach target,$(FUZZ_TARGETS),$(FUZZ_OF_$(target):%=$(FUZZ)/%.o))
$(foreach target,$(FUZZ_TARGETS),$(eval $(FUZZ)/$(target): $(FUZZ_OF_$(target):%=$(FUZZ)/%.o)))

$(FUZZ_OBJECTS): $(FUZZ)/%.o: $(SRC)/%.cpp
	@mkdir -p $(@D)
	$(FUZZ_CXX) $(FUZZ_FLAGS) -MMD -c $< -o $@

$(FUZZ)/tests/%.o: tests/fuzz/%.cpp
	@mkdir -p $(@D)
	$(FUZZ_CXX) $(FUZZ_FLAGS) -MMD -c $< -o $@

$(FUZZ_TARGETS:%=$(FUZZ)/%): $(FUZZ)/%: $(FUZZ)/tests/%.o $(FUZZ)/tests/standalone.o
	$(FUZZ_CXX) $(if $(FUZZ_CLANG),$(subst fuzzer-no-link,fuzzer,$(FUZZ_FLAGS)) $(filter-out %/standalone.o,$^),\
		$(FUZZ_FLAGS) $^) -o $@

-include $(FUZZ_OBJECTS:.o=.d) $(wildcard $(FUZZ)/tests/*.d)
.PRECIOUS: $(FUZZ)/tests/%.o

fuzz-targets: $(FUZZ_TARGETS:%=$(FUZZ)/%)

# What is found lies in build/fuzz/TARGET-crash-*, the inputs that reach new code in build/fuzz/corpus/TARGET.
fuzz: $(FUZZ_TARGETS:%=fuzz-%)
fuzz-%: $(FUZZ)/%
	FUZZ_WRITE_SEEDS=$(FUZZ)/corpus/$* $<
	$< -max_total_time=$(SECONDS) -max_len=8192 -timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=128 -print_final_stats=1 \
		-artifact_prefix=$(FUZZ)/$*- $(FUZZ)/corpus/$*

# What agreement costs at 64 to 16,384 simulated ranks; docs/scale.md shows it. Optimised, without sanitizers.
SCALE := build/scale/scale
SCALE_SOURCES := $(wildcard benchmarks/scale/*.cpp csrc/coordinator/*.cpp)
$(SCALE): $(SCALE_SOURCES) $(wildcard benchmarks/scale/*.h csrc/*/*.h)
	@mkdir -p $(@D)
	$(CXX) -std=c++20 -O2 -g -Wall -Wextra -Werror -Wno-restrict -Icsrc -Ibenchmarks/scale -pthread $(SCALE_SOURCES) -o $@

scale: $(SCALE) $(VENV)/.test-tools
	$(BIN)/python benchmarks/scale.py

demo: all
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/ddp_subgroups.py

# The second run holds Gloo to the same right results, where it has the operation.
test: all $(VENV)/.test-tools $(SIM)/simulate $(SIM)/engine_test $(TSAN)/threads_test $(FAST_SIMULATE) $(ORDER_TEST) $(SCALE) $(DEVICE) $(DEVICE_MPI) $(NCCL_DOUBLE) fuzz-targets
	$(BIN)/python -m pytest
	MULTICOMM_TEST_BACKEND=gloo $(BIN)/python -m pytest -q -p no:cacheprovider -r f tests/test_operations.py

lint: all $(VENV)/.test-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc tests benchmarks -name '*.cpp' -o -name '*.h')

bench: all $(VENV)/.test-tools
	$(BIN)/python benchmarks/bench.py --plot build/bench/results.png

# Thousands of groups, made one after the other and all at once: what they leave behind. A minute or two.
soak: all $(VENV)/.test-tools
	MULTICOMM_TEST_SOAK=1 $(BIN)/python -m pytest tests/test_groups.py -k thousands

# torch's own distributed tests, which ship in its wheel: 4 to 8 seconds each. TESTS narrows them: TESTS="-k all_reduce"
peer-suite: all $(VENV)/.test-tools
	BACKEND=multicomm WORLD_SIZE=3 $(BIN)/python tests/peer_suite.py -v $(TESTS)

# On machines with GPUs: no .venv, nothing is downloaded; with the Python that has torch (GPU_PYTHON) and the MPI that is
# there, or one brought along (OPENMPI; tests/gpu/offline_build.py says how). Less than 8 minutes, the build included.
# GPU_DOUBLE=1 tries the scripts themselves without a GPU; GPU_DOUBLE=FOLDER with doubles that lie there.
GPU_PYTHON ?= $(shell for p in $(if $(filter 1,$(GPU_DOUBLE)),"$(BIN)/python") "$(PYTHON)" python "$(BIN)/python"; do \
	$$p -c "import torch" 2>/dev/null && echo $$p && exit; done; echo $(PYTHON))
export OPENMPI GPU_DOUBLE
GPU_DOUBLES := $(if $(filter 1,$(GPU_DOUBLE)),$(DEVICE) $(NCCL_DOUBLE))

test-gpu: $(GPU_DOUBLES)
	$(GPU_PYTHON) tests/gpu/run.py $(if $(TESTS),--only "$(TESTS)")

bench-gpu: $(GPU_DOUBLES)
	$(GPU_PYTHON) benchmarks/gpu.py

clean:
	rm -rf build $(VENV)/.built
