# Everything sets itself up: only Python 3.11-3.13 and make are needed.
#   make demo    train a small MoE on this machine and write a report
#   make test    lint, types and all tests
#   make oldest  what touches Transformers' modules, on the oldest Transformers supported
#   make docs    build the documentation as a site, in an environment of its own
#   make wheels  build every wheel, install core + one plugin into an empty environment and run them there
# TORCH chooses the build, e.g. `make demo TORCH=torch` or an index of your own in PIP_EXTRA_INDEX_URL.
TORCH ?= torch==2.13.0
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null \
	&& { command -v $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
# The examples are installed as well: distributions by somebody else, tested with core and plugins.
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml examples/*/pyproject.toml))
PROJECTS := pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
STAMP := $(VENV)/.miles-installed
# Installed once, and not again in an environment for each project.
BUILDERS := 'flit_core>=3.11,<4' 'hatchling>=1.26' editables

OLDEST ?= .venv-oldest
DOCS ?= .venv-docs
JOBS ?= 2

.PHONY: demo test oldest lint types wheels docs install clean

install: $(STAMP)

$(STAMP): $(PROJECTS) Makefile
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; give one with make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" $(BUILDERS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[dev]" $(foreach p,$(PLUGINS),-e ./$(p))
	@touch $(STAMP)

demo: install
	$(BIN)/miles demo $(DEMO)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

# The parts that touch Transformers' modules, on the oldest version supported (SGLang's pin), which shadows the installed one.
oldest: install $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(BIN)/python -c "import transformers; assert transformers.__version__ == '5.12.1', transformers.__version__"
	PYTHONPATH=$(OLDEST) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/embedded --ignore tests/embedded/trainer/test_data_parallel.py \
		tests/test_loop.py::test_it_learns tests/cli/test_convert.py plugins/r3/tests/test_routers.py \
		plugins/r3/tests/test_embedded.py plugins/cpu_kernels/tests/test_models.py plugins/cpu_kernels/tests/test_experts.py

$(OLDEST)/.installed: Makefile
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) transformers==5.12.1 tokenizers==0.22.2 \
		'huggingface-hub<2'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(OLDEST) httpx
	@touch $@

wheels:
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found; give one with make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) tests/packaging/check_wheels.py --python $(PYTHON) --torch "$(TORCH)"

# Names are read from the source, so the environment needs no torch. Not a part of the tests: these find broken links without it.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo build/site/index.html

$(DOCS)/.installed: Makefile
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check 'mkdocs-material >=9.6' 'mkdocstrings[python] >=0.29' ruff
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(DOCS) build dist
