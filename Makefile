# Everything sets itself up: only Python 3.11-3.13 and make are needed.
#   make demo    train a small MoE on this machine and write a report
#   make test    lint, types and tests; also one by one: make lint, make types, make pytest
#   make test-thorough  all tests, the slow ones and those of engines included
#   make test-engines  the tests of SGLang and Megatron-Core that run on a CPU, with both installed
#   make skipped what no run could execute, with the reason
#   make oldest  what touches Transformers' modules, on the oldest Transformers supported
#   make docs    build the documentation as a site, in an environment of its own
#   make wheels  build every wheel into dist, install core + one plugin into an empty environment and run them there
#   make release VERSION=X.Y.Z  set the version, build the wheels, commit and tag; make constraints  check the constraint files
# TORCH chooses the build, e.g. `make demo TORCH=torch` or an index of your own in PIP_EXTRA_INDEX_URL.
TORCH ?= torch==2.13.0
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& { command -v $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
# One line per download, which takes minutes on a slow connection; pip's bar shows how far a large one is.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on
comma := ,
SAY = @echo "installing, $(1)"
# The examples are installed as well: distributions by somebody else, tested with core and plugins.
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml examples/*/pyproject.toml))
# Those whose manifest has a `demo`.
DEMO_PLUGINS := plugins/r3 plugins/tis
PROJECTS := pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
STAMP := $(VENV)/.miles-installed
# Installed once, and not again in an environment for each project.
BUILDERS := 'flit_core>=3.11,<4' 'hatchling>=1.26' editables

OLDEST ?= .venv-oldest
ENGINES ?= .venv-engines
DOCS ?= .venv-docs
JOBS ?= 2
# What `make test` skips because it needs one of the engines or Triton, whose interpreter runs kernels on a CPU.
MEGATRON_TESTS ?= $(addprefix plugins/megatron/tests/test_,$(addsuffix .py,delta delta_plan delta_run device_memory exact_families mamba mamba_plan mtp options oracle replay run trainer)) plugins/lora/tests/test_megatron.py \
	plugins/fp8/tests/test_kernel_together.py plugins/fp8/tests/test_row_codes.py plugins/fp8/tests/test_tiles.py plugins/r3/tests/test_operation.py tests/embedded/kernels tests/embedded/trainer/test_flash.py tests/workers/transport/test_checksum.py::test_the_kernel_copies_and_adds_up
SGLANG_TESTS ?= plugins/sglang/tests/test_contract.py plugins/sglang/tests/test_lora.py \
	plugins/sglang/tests/test_manifest.py::test_the_table_is_that_of_the_installed_sglang \
	plugins/sglang/tests/test_manifest.py::test_the_architectures_are_those_of_the_installed_sglang \
	plugins/sglang/tests/test_manifest.py::test_families_whose_routes_the_installed_sglang_does_not_record_are_refused
# With the run's own Transformers, and SGLang's for its processes only.
SGLANG_IMAGE_TESTS ?= plugins/sglang/tests/test_images.py::test_a_real_sglang_computes_what_the_embedded_engine_computes
# Which tests: without the slow ones, or all ('thorough or not thorough'). SLOW_PART=K/N adds a part of the slow ones.
MARKS ?= not thorough
SLOW_PART ?=
# Where pytest writes what it skipped; tests/skipped.py reads these files.
REPORTS ?= build/tests

.PHONY: demo test test-thorough slow-tests pytest oldest engines test-engines test-megatron test-sglang skipped lint types wheels release constraints docs install clean

install: $(STAMP)

$(STAMP): $(PROJECTS) Makefile
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; give one with make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call SAY,1 of 3: $(TORCH))
	$(PIP) "$(TORCH)" $(BUILDERS)
	$(BIN)/python tests/packaging/third_party.py $(PLUGINS) > $(VENV)/third-party.txt
	$(call SAY,2 of 3: miles-core and the packages that it and the tools need)
	$(PIP) --no-build-isolation -e ".[dev]" -r $(VENV)/third-party.txt
	$(call SAY,3 of 3: the plugins)
	$(PIP) --no-deps --no-build-isolation $(foreach p,$(PLUGINS),-e ./$(p))
	@touch $(STAMP)

# Needs core and the plugins with a part in it, not the development tools.
demo: $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.demo-installed)
	$(BIN)/miles demo $(DEMO)

$(VENV)/.demo-installed: pyproject.toml $(addsuffix /pyproject.toml,$(DEMO_PLUGINS))
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; give one with make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call SAY,1 of 2: $(TORCH))
	$(PIP) "$(TORCH)" $(BUILDERS)
	$(call SAY,2 of 2: miles-core$(comma) Transformers and the plugins of the demo)
	$(PIP) --no-build-isolation -e . $(foreach p,$(DEMO_PLUGINS),-e ./$(p))
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

test: lint types pytest

test-thorough:
	$(MAKE) test oldest test-engines MARKS='thorough or not thorough'

pytest: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(MARKS)" --slow-part "$(SLOW_PART)" --junit-xml $(REPORTS)/all.xml $(TESTS)

# After make test-thorough on a quiet machine.
slow-tests:
	$(BIN)/python tests/list_slow_tests.py $(wildcard $(REPORTS)/*.xml)

# The parts that touch Transformers' modules, on the oldest version supported (SGLang's pin), which shadows the installed one.
oldest: install $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(BIN)/python -c "import transformers; assert transformers.__version__ == '5.12.1', transformers.__version__"
	PYTHONPATH=$(OLDEST) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(MARKS)" tests/embedded \
		$(foreach t,kernels trainer/test_data_parallel.py trainer/test_fully_shard.py trainer/test_loss_scale.py trainer/test_nonfinite.py,--ignore tests/embedded/$(t)) \
		tests/test_loop.py::test_it_learns tests/tools/commands/test_convert.py plugins/r3/tests/test_routers.py \
		plugins/r3/tests/test_embedded.py plugins/cpu_kernels/tests/test_models.py plugins/cpu_kernels/tests/test_experts.py

$(OLDEST)/.installed: Makefile
	rm -rf $(OLDEST)
	$(PIP) --no-deps --target $(OLDEST) transformers==5.12.1 tokenizers==0.22.2 \
		'huggingface-hub<2'
	$(PIP) --target $(OLDEST) httpx
	@touch $@

# SGLang and Megatron-Core on a CPU: pinned, without dependencies that need CUDA, each in a folder that shadows what is installed.
# Packages that only need to be importable have stand-ins. SGLang pins its Transformers; Megatron-Core runs with the newest.
engines: install $(ENGINES)/.installed

test-engines: test-megatron test-sglang

test-megatron: engines
	PYTHONPATH=$(abspath $(ENGINES)/megatron):$(abspath $(ENGINES)/common) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "$(MARKS)" --slow-part "$(SLOW_PART)" --junit-xml $(REPORTS)/megatron.xml $(MEGATRON_TESTS)

# In one process: most of these tests share one SGLang.
test-sglang: engines
	PYTHONPATH=$(abspath tests/engines/stand_ins):$(abspath $(ENGINES)/sglang):$(abspath $(ENGINES)/common) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -m "$(MARKS)" --slow-part "$(SLOW_PART)" --junit-xml $(REPORTS)/sglang.xml $(SGLANG_TESTS)
	MILES_TEST_SGLANG_PATH=$(abspath tests/engines/stand_ins):$(abspath $(ENGINES)/sglang):$(abspath $(ENGINES)/common) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -m "$(MARKS)" --slow-part "$(SLOW_PART)" --junit-xml $(REPORTS)/sglang_images.xml $(SGLANG_IMAGE_TESTS) \
		|| test $$? -eq 5  # no test is selected: all of them are thorough

# Every test that no run so far could execute, by reason; 1 if a reason is not in docs/skipped-tests.md.
skipped:
	$(BIN)/python tests/skipped.py $(REPORTS)

PINNED := $(PIP) --no-deps --require-hashes --only-binary :all:

$(ENGINES)/.installed: $(wildcard tests/engines/*.txt)
	rm -rf $(ENGINES)
	$(PINNED) --target $(ENGINES)/common -r tests/engines/common.txt
	$(PINNED) --target $(ENGINES)/sglang -r tests/engines/sglang.txt
	$(PINNED) --target $(ENGINES)/megatron --python-version 3.12 --ignore-requires-python -r tests/engines/megatron.txt
	@touch $@

wheels:
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; give one with make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) tests/packaging/check_wheels.py --python $(PYTHON) --torch "$(TORCH)" --out dist

# A version, its notes, its wheels and their checksums: make release VERSION=0.2.0 commits and tags; nothing is pushed or uploaded.
release:
	$(PYTHON) tests/packaging/release.py $(VERSION) --python $(PYTHON) --torch "$(TORCH)"

# Whether the versions in constraints/ can be installed; needs uv, and downloads metadata only.
constraints:
	$(PYTHON) constraints/resolve.py

# Names are read from the source, so the environment needs no torch. Not a part of the tests: these find broken links without it.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo build/site/index.html

$(DOCS)/.installed: Makefile
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check 'mkdocs-material >=9.6' 'mkdocstrings[python] >=0.29' ruff
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(ENGINES) $(DOCS) build dist
