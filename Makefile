# make demo        install into .venv and run the example (the GPU is used when there is one)
# make test        every test that needs no GPU
# make test-gpu    the tests that need one
# make sanitize    a small step of every kernel under compute-sanitizer's memcheck, or another TOOL
# make lint        ruff
# make docs        the site into build/site, API included; nothing is fetched once the tools are installed
#
# VENV= runs the PYTHON given as it is, and installs nothing: it has torch, triton and pytest already.
# ARGS goes to the example, or to pytest: options, no names of tests.

PYTHON ?= python3
VENV ?= .venv
TOOL ?= memcheck
ARGS ?=

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

.PHONY: demo test test-rewriting test-kernels test-rest test-gpu sanitize lint docs clean

demo: $(INSTALLED)
	$(RUN) examples/train_moe_lm.py $(ARGS)

# Three parts, two at a time, the longest first.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --keep-going --jobs 2 test-rest test-kernels test-rewriting

REWRITING := tests/rewrite tests/hf tests/system/test_fuzz.py tests/system/test_modes.py

test-rewriting:
	$(RUN) -m pytest -m "not gpu" $(REWRITING) $(ARGS)

test-kernels:
	TRITON_INTERPRET=1 $(RUN) -m pytest tests/interpreter $(ARGS)

test-rest:
	$(RUN) -m pytest -m "not gpu" --ignore=tests/interpreter $(REWRITING:%=--ignore=%) $(ARGS)

test-gpu: $(INSTALLED)
	$(RUN) -m pytest -m gpu $(ARGS)

sanitize: $(INSTALLED)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" compute-sanitizer --tool $(TOOL) --error-exitcode 1 $(shell command -v $(lastword $(RUN))) tests/tools/sanitize.py

lint: $(INSTALLED)
	$(RUN) -m ruff check .

# The sources of the API are read, not imported, so the tools are all that this needs.
docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(DOCS_RUN) -m mkdocs build --quiet
	@echo "build/site/index.html"

clean:
	rm -rf build dist outputs *.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("moeblaze needs Python 3.10 or newer, $(PYTHON) is " + sys.version.split()[0])'
	@echo "installing into $(VENV): a few minutes the first time, 2 GB with a CPU build of torch, more with CUDA"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[test,demo]" ruff
	@touch $@

$(VENV)-docs/.installed: pyproject.toml constraints.txt
	@test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -m pip install --quiet --constraint constraints.txt mkdocs-material "mkdocstrings[python]" ruff
	@touch $@
