# `make` lists the targets. Each sets up .venv by itself; a second run starts at once.
#
#   make test PYTHON=python3.12           build .venv from that interpreter
#   make test PY=python3                  use that interpreter as it is, and set up nothing
#   make demo TORCH="--index-url https://download.pytorch.org/whl/cpu"
#                                         where pip gets torch (PyPI's build for Linux brings CUDA, some GB)
#   make test ARGS="-k graph -x"          more for pytest, or for the demo
#   make gpu CUDA=cuda12                  the extra for an older driver

PYTHON ?= python3
CUDA   ?= cuda13
TORCH  ?=
ARGS   ?=

PY     := .venv/bin/python
MODEL  := .models/smollm2
PYTEST  = $(PY) -m pytest

ifeq ($(origin PY),command line)
SETUP :=
SETUP_GPU :=
ORBITKV := $(PY) -c 'import sys; from orbitkv.cli import main; sys.exit(main())'
else
SETUP := .venv/.installed
SETUP_GPU := .venv/.installed-$(CUDA)
ORBITKV := .venv/bin/orbitkv
endif

# Every kernel, in few launches: the sanitizer slows each down a hundredfold.
SANITIZED := tests/gpu -k "share_a_launch or tails_are or own_tasks or one_bad_task or takes_one_step"

MAKEFLAGS += --no-print-directory
SHELL := /bin/sh
.SHELLFLAGS := -euc
.ONESHELL:
.PHONY: help demo test check bench gpu sanitize model clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 14

demo: $(SETUP) $(MODEL)/.fetched ## a real model's KV cache leaves the engine and comes back
	@$(ORBITKV) demo --model $(MODEL) $(ARGS)

test: $(SETUP) ## every test that needs no GPU; says what it skipped and why
	@$(PYTEST) -m "not gpu and not gds and not soak" $(ARGS)

check: $(SETUP) ## ruff, mypy --strict, the layering of imports, and every kernel for every GPU
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict orbitkv
	$(PYTEST) -q tests/test_layering.py
	$(PY) tools/check_kernels.py

bench: $(SETUP) $(MODEL)/.fetched ## every benchmark, one after the other
	@$(call needs,command -v fio,fio,U is not measured beside it)
	failed=
	for bench in benchmarks/bench_*.py; do
	    echo "== $$bench"
	    $(PY) "$$bench" || failed="$$failed $$bench"
	done
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

gpu: $(SETUP_GPU) ## the tests that need an NVIDIA GPU
	@$(PYTEST) -m gpu $(ARGS)

sanitize: $(SETUP_GPU) ## some GPU tests under compute-sanitizer: memory, then races
	@for tool in memcheck racecheck; do
	    echo "== $$tool"
	    compute-sanitizer --tool $$tool --error-exitcode 1 --target-processes all \
		$(PYTEST) -q -m "gpu and not soak" $(SANITIZED) $(ARGS)
	done

model: $(MODEL)/.fetched ## fetch SmolLM2-135M (93 MB) into .models/
	@echo "$(MODEL): $$(ls $(MODEL))"

clean: ## remove what make made, except .models/
	@rm -rf .venv build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call needs,<command that succeeds where it is there>,<Debian package>,<what happens without it>)
define needs
    if ! { $(1); } >/dev/null 2>&1; then
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	    echo "installing the Debian package $(2)"
	    export DEBIAN_FRONTEND=noninteractive
	    { apt-get -qq update && apt-get -qq install -y --no-install-recommends $(2); } >/dev/null || true
	fi
	{ $(1); } >/dev/null 2>&1 ||
	    echo "$(2) is missing, so $(3); to get it, as root: apt-get install $(2)" >&2
    fi
endef

# An interrupted installation leaves no stamp, and the next run goes on from there.
.venv/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || {
	    echo "$(PYTHON) is missing: install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2
	    exit 1
	}
	version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	    echo "$(PYTHON) is Python $$version, and 3.11 or newer is needed: name one: make PYTHON=python3.12" >&2
	    exit 1
	}
	if ! .venv/bin/python -m pip --version 2>/dev/null | grep -q "(python $$version)"; then
	    $(call needs,$(PYTHON) -c "import ensurepip",python$$version-venv,Python cannot make .venv)
	    $(PYTHON) -c 'import ensurepip' 2>/dev/null || exit 1
	    rm -rf .venv
	    $(PYTHON) -m venv .venv
	fi
	$(call needs,$(PYTHON) -c "import ctypes; ctypes.CDLL('liburing.so.2')",liburing2,SSD files are written by threads instead of io_uring)
	echo "installing into .venv; the first time takes minutes"
	.venv/bin/python -m pip install -qq -c constraints.txt torch $(TORCH)
	.venv/bin/python -m pip install -qq -c constraints.txt -e '.[dev,transformers]'
	touch $@

.venv/.installed-$(CUDA): .venv/.installed
	@echo "installing the extra $(CUDA) into .venv"
	.venv/bin/python -m pip install -qq -c constraints.txt -e '.[$(CUDA)]'
	touch $@

$(MODEL)/.fetched: tools/fetch_smollm2.sh | $(SETUP)
	@tools/fetch_smollm2.sh $(PY) $(MODEL)
	touch $@
