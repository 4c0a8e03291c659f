# make demo        install into .venv and run the example (the GPU is used when there is one)
# make test        every test that needs no GPU
# make test-gpu    the tests that need one
# make sanitize    a small step of every kernel under compute-sanitizer's memcheck, or another TOOL
# make lint        ruff
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
else
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
endif

.PHONY: demo test test-rewriting test-kernels test-rest test-gpu sanitize lint clean

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

clean:
	rm -rf build dist outputs *.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("moeblaze needs Python 3.10 or newer, $(PYTHON) is " + sys.version.split()[0])'
	@echo "installing into $(VENV): a few minutes the first time"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[test,demo]" ruff
	@touch $@
