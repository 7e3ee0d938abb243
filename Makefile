# make demo    the main job on the CPU, within a minute
# make test    the test-suite
# make test-ascend   the Ascend backend under real torch_npu, on a simulated driver with an emulated kernel
# make test-gfx950   HIP's machine code for gfx950, compiled by PyPI's ziglang: Debian's clang 19 does not know it
# make test-sglang, test-vllm, test-lmcache, test-transformers, test-mooncake, test-vllm_mooncake ...
#              each integration with the real package, in a venv of its own
# make lint    every check of the sources (pre-commit)
# make asan    the CPU backend's tests under AddressSanitizer and UBSan
# make bench   figures of this machine
# make wheel   the one wheel, in dist/
#
# All of them work from a fresh clone: they make .venv, install requirements.txt into it and build.
# System packages needed: python3 (3.10 or newer) with venv, a C++17 compiler, make. nvcc is optional.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml
LIBRARY := torch_hicache/_C.so
# For a newer torch beside the one that built the libraries: make test-torch TORCH=2.14.1
TORCH ?= 2.14.1
OTHER := .venv-torch-$(TORCH)
# torch_npu breaks `import torch` where it finds no driver, so it has an environment of its own.
ASCEND := .venv-ascend
ASCEND_PACKAGES := torch==2.13.0 torch-npu==2.13.0 memfabric-hybrid==1.3.0
ASCEND_SIM := $(CURDIR)/build/ascend_sim
ASCEND_RUN := env HICACHE_ASCEND_SIM=$(ASCEND_SIM) HICACHE_REQUIRE=npu LD_PRELOAD=$(ASCEND_SIM)/libpreload.so \
  PYTHONPATH=$(CURDIR)/test/ascend_sim/site:$(CURDIR) timeout --kill-after=10 1500 $(ASCEND)/bin/python -m pytest -q

INTEGRATIONS := sglang vllm lmcache transformers mooncake sglang_mooncake vllm_mooncake
# Mooncake's clients listen on every interface: a network of their own, without any.
WITHIN_mooncake := unshare --map-root-user --net
WITHIN_sglang_mooncake := $(WITHIN_mooncake)
WITHIN_vllm_mooncake := $(WITHIN_mooncake)

.PHONY: setup build demo test test-ascend test-gfx950 test-torch lint asan bench wheel clean $(INTEGRATIONS:%=test-%)
.DEFAULT_GOAL := build

setup: $(VENV)/installed
build: $(LIBRARY)

$(VENV)/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "make: $(PYTHON) is missing or older than 3.10 (Debian: apt-get install python3)"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "make: python's venv is missing (Debian: apt-get install python3-venv)"; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null \
	  || { echo "make: no C++ compiler (Debian: apt-get install g++)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	touch $@

# The package is installed as links into the tree; the libraries are built in place.
$(LIBRARY): $(VENV)/installed $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

demo: build
	$(BIN)/hicache replay

test: build
	$(BIN)/python -m pytest

$(ASCEND)/installed: requirements.txt Makefile
	$(PYTHON) -m venv $(ASCEND)
	$(ASCEND)/bin/python -m pip install --quiet $(ASCEND_PACKAGES) pyyaml setuptools \
	  $$(grep -E '^(numpy|rich|pytest|expecttest|hypothesis)==' requirements.txt)
	touch $@

# The op's suite on npu tensors, then what is Ascend's alone. Inductor generates no code for an NPU.
test-ascend: build $(ASCEND)/installed
	$(ASCEND)/bin/python test/ascend_sim/build.py $(ASCEND_SIM)
	$(ASCEND_RUN) -k "npu and not all_lengths and not compiled_graph" test/test_transfer_kv.py test/test_indices.py \
	  test/test_overlap.py test/test_errors.py test/test_fake.py test/test_fuzz.py test/test_pool.py test/test_far_rows.py \
	  test/test_engine*.py
	$(ASCEND_RUN) test/test_ascend*.py test/test_memfabric.py

# Built in a copy of the tree, whose HIP library no other test uses; needs clang-19's tools and HIP's headers.
GFX950 := build/gfx950
test-gfx950: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --upgrade --target build/zig ziglang==0.17.1
	mkdir -p $(GFX950)
	cp -r setup.py pyproject.toml README.md LICENSE requirements.txt csrc test torch_hicache $(GFX950)
	cd $(GFX950) && export HICACHE_ZIG=$(CURDIR)/build/zig/ziglang HIPCXX=$(CURDIR)/$(GFX950)/test/hip_zig/hipcc && \
	  HICACHE_BACKENDS=cpu,hip PYTORCH_ROCM_ARCH=gfx950 $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace && \
	  HICACHE_REQUIRE=hip $(CURDIR)/$(BIN)/python -m pytest -k gfx950 test/test_hip_isa.py test/test_hip_machine_code.py

# The same libraries under another torch, from the wheel; without the files that look at machine code only.
test-torch: wheel
	test -d $(OTHER) || $(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet torch==$(TORCH) \
	  $$(grep -E '^(numpy|rich|matplotlib|prometheus-client|pytest|expecttest|hypothesis)==' requirements.txt)
	$(OTHER)/bin/python -m pip install --quiet --no-deps --force-reinstall dist/torch_hicache-*.whl
	cmp $(LIBRARY) $$($(OTHER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/$(LIBRARY)
	cd test && ../$(OTHER)/bin/pytest -c ../pyproject.toml --rootdir=.. . \
	  --ignore=test_hip_isa.py --ignore=test_hip_machine_code.py --ignore=test_hip_sim.py --ignore=test_hip_methods.py

# An integration's packages are listed whole in test/integrations/<name>.txt: what they pin among
# themselves cannot be had together.
.venv-%/installed: test/integrations/%.txt requirements.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet $$(grep -E '^(torch|numpy|rich|pytest|expecttest)==' requirements.txt)
	.venv-$*/bin/python -m pip install --quiet --no-deps --requirement $<
	touch $@

$(INTEGRATIONS:%=test-%): test-%: .venv-%/installed wheel
	.venv-$*/bin/python -m pip install --quiet --no-deps --force-reinstall dist/torch_hicache-*.whl
	cd test && $(WITHIN_$*) ../.venv-$*/bin/python -m pytest -c ../pyproject.toml --rootdir=.. integrations/$*

lint: build
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files --show-diff-on-failure

asan: build
	HICACHE_SANITIZE=1 HICACHE_BACKENDS=cpu $(BIN)/python setup.py --quiet build --build-lib build/asan
	cd test && PYTHONPATH=$(CURDIR)/build/asan HICACHE_SANITIZED=1 \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ../$(BIN)/pytest -c ../pyproject.toml --rootdir=.. \
	  test_transfer_kv.py test_indices.py test_overlap.py test_far_rows.py test_errors.py test_fuzz.py

bench: build
	$(BIN)/python benchmark/bench_transfer_kv.py

wheel: build
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	ls dist

clean:
	rm -rf build dist *.egg-info torch_hicache/*.so torch_hicache/_build.json
