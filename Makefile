# make check       while one works: lint, types and the fast tests
# make test        every test that needs no GPU, in parts that run alone as well:
#                  test-fast test-ops test-rewrite test-operands test-capture test-ranks test-slow test-export test-hf test-offline
#                  test-door test-interpreter
# make test-door-all   every spelling of a layer in every way to compile and train a model
# make versions    what is replaced of torch, captured branches and some rewrites, with each torch of VERSIONS in a venv of its own,
#                  or with those that are in VENVS
# make test-gpu    the tests that need a GPU
# make demo        install into .venv and run the example (the GPU is used when there is one)
# make demo-distributed  the same model with its experts spread over two processes, or over PROCESSES
# make sanitize    a small step of every kernel under compute-sanitizer's memcheck, or another TOOL
# make lint        ruff
# make types       mypy
# make format      ruff format
# make docs        the site into build/site, API included; nothing is fetched once the tools are installed.
#                  REPOSITORY=https://... adds a link to it
# make release     sdist and wheel of the last commit into dist/, checked with each torch of VERSIONS or VENVS; nothing is published.
#                  REPOSITORY=https://... makes README's links absolute, as an index needs them
# make kernels-hub a repository of the Hugging Face kernels hub into build/kernels-hub; nothing is published
#
# VENV= runs the PYTHON given as it is, and installs nothing: it has torch, triton and pytest already.
# ARGS goes to the example, or to pytest: options, no names of tests.

PYTHON ?= python3
VENV ?= .venv
TOOL ?= memcheck
ARGS ?=
PROCESSES ?= 2
VERSIONS ?= 2.11.0 2.13.0 2.14.1 2.15.0
VENVS ?=
REPOSITORY ?=

ifeq ($(strip $(VENV)),)
RUN := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
INSTALLED :=
DOCS_RUN := $(PYTHON)
DOCS_INSTALLED :=
else
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DOCS_RUN := $(VENV)-docs/bin/python
DOCS_INSTALLED := $(VENV)-docs/.installed
endif

# The longest part first, and three at a time for two cores: parts wait for other processes, for compilers and for the disk. Each
# has two thirds of a core then, so that one of more than a third of all the work would still run when the others have ended.
PARTS := test-capture test-ranks test-slow test-rewrite test-operands test-offline test-door test-interpreter test-hf test-ops test-fast test-export
AT_A_TIME := 3
# What one part prints is not mixed with what another one does.
PARALLEL := --no-print-directory --keep-going --output-sync=target --jobs

# What depends on Dynamo's functions, and a little of what does not.
OF_EACH_VERSION := tests/project/test_import.py tests/project/test_patches.py tests/project/test_design.py tests/capture/test_attempts.py \
	tests/capture/test_branches.py tests/rewrite/results/test_rewritten_graph.py $(wildcard tests/door)

.PHONY: check demo demo-distributed test $(PARTS) test-door-all versions test-gpu sanitize lint types docs release kernels-hub clean
.DEFAULT_GOAL := check

demo: $(INSTALLED)
	$(RUN) examples/train_moe_lm.py $(ARGS)

demo-distributed: $(INSTALLED)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) -m torch.distributed.run --standalone --nproc-per-node $(PROCESSES) examples/train_multi_gpu.py $(ARGS)

$(PARTS) types lint: $(INSTALLED)

# Each part runs on one thread: a second one would wait for the other parts'. Inductor compiles in the part's process.
$(PARTS) test-door-all: export OMP_NUM_THREADS ?= 1
$(PARTS) test-door-all: export TORCHINDUCTOR_COMPILE_THREADS ?= 1

check: $(INSTALLED)
	@$(MAKE) $(PARALLEL) 2 types test-fast lint

test: $(INSTALLED)
	@$(MAKE) $(PARALLEL) $(AT_A_TIME) $(PARTS)

$(filter-out test-hf,$(PARTS)):
	$(RUN) -m pytest --tier $(@:test-%=%) -m "not gpu" $(ARGS)

# All of them where there is transformers, else a few in a venv that adds it: beside it, other parts would have more tests to run.
test-hf:
	@if $(RUN) -c "import transformers" 2>/dev/null; then $(RUN) -m pytest --tier hf -m "not gpu" $(ARGS); \
	elif test -n "$(VENV)"; then .ci/clients $(lastword $(RUN)) $(ARGS); \
	else echo "SKIPPED all of tests/hf: transformers is not installed (pip install '.[hf]')"; fi

# Takes 15 minutes of a core; what test-door runs of it is each way to train once, and each spelling.
test-door-all: $(INSTALLED)
	DOOR_BY_HAND=1 $(RUN) -m pytest --tier door -k every_spelling $(ARGS)

test-interpreter: export TRITON_INTERPRET = 1

versions: export OMP_NUM_THREADS ?= 1
versions: export TORCHINDUCTOR_COMPILE_THREADS ?= 1
versions: $(if $(VENVS),,$(VERSIONS:%=.venv-%/.installed))
	@for venv in $(or $(VENVS),$(VERSIONS:%=.venv-%)); do \
		$$venv/bin/python -c "import torch; print('torch', torch.__version__)" && \
		PYTHONPATH="$(CURDIR)" $$venv/bin/python -m pytest $(OF_EACH_VERSION) -m "not gpu" $(ARGS) || failed="$$failed $$venv"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

test-gpu: $(INSTALLED)
	$(RUN) -m pytest -m gpu $(ARGS)

sanitize: $(INSTALLED)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" compute-sanitizer --tool $(TOOL) --error-exitcode 1 $(shell command -v $(lastword $(RUN))) tests/tools/sanitize.py

lint:
	$(RUN) -m ruff check .

format: $(INSTALLED)
	$(RUN) -m ruff format .

types:
	@.ci/types $(lastword $(RUN))
# The sources of the API are read, not imported, so the tools are all that this needs.
docs: $(DOCS_INSTALLED)
	REPOSITORY="$(REPOSITORY)" NO_MKDOCS_2_WARNING=1 $(DOCS_RUN) -m mkdocs build --quiet
	@echo build/site/index.html

release: $(INSTALLED) $(if $(VENVS),,$(VERSIONS:%=.venv-%/.installed))
	$(RUN) .ci/release $(if $(REPOSITORY),--repository $(REPOSITORY))
	@for venv in $(or $(VENVS),$(VERSIONS:%=.venv-%)); do \
		$$venv/bin/python -c "import torch; print('torch', torch.__version__)" && \
		DIST="$(CURDIR)/dist" $$venv/bin/python -m pytest tests/project/test_packaging.py $(ARGS) || failed="$$failed $$venv"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

kernels-hub: $(INSTALLED)
	$(RUN) .ci/kernels-hub

clean:
	rm -rf build dist outputs *.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("moeblaze needs Python 3.10 or newer, $(PYTHON) is " + sys.version.split()[0])'
	@echo "installing into $(VENV): a few minutes the first time, 2 GB with a CPU build of torch, more with CUDA"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[test,demo]" mypy ruff
	@touch $@

.venv-%/.installed: pyproject.toml
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	@.venv-$*/bin/python -m pip install --quiet torch==$* --editable ".[test]"
	@touch $@

$(VENV)-docs/.installed: pyproject.toml constraints.txt
	@test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -m pip install --quiet --constraint constraints.txt mkdocs-material "mkdocstrings[python]" ruff
	@touch $@
