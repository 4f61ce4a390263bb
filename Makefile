# make demo    run the main job: both KernelBench problems, full size on a GPU, reduced on a CPU
# make test    run the tests; GPU tests skip, and say why, where there is no GPU
# make bench   time gsbn beside its peers, rewrite the README's results table and docs/results/
# make lint    ruff, mypy, clang-format; changes nothing
# make format  let ruff and clang-format rewrite the sources
# make clean   remove what the targets above made
#
# Each target sets up what it needs in a virtual environment, once.
#   PYTHON=python3.12   the interpreter that makes the environment
#   VENV=path           where the environment lies; `VENV=` (empty) uses PYTHON as it is and installs nothing
#   EXTRA=cuda13        the extra to install; the default asks the NVIDIA driver
#   ARGS='-m gpu -x'    more arguments for demo, test or bench

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test bench lint format clean

ifeq ($(strip $(VENV)),)
run := $(PYTHON)
bin = $(dir $(shell $(PYTHON) -c 'import sys; print(sys.executable)'))
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
ifndef EXTRA
EXTRA := $(shell $(PYTHON) tools/cuda_extra.py)
endif
bin        := $(VENV)/bin/
run        := $(bin)python
env        := $(VENV)/.gsbn
pip        := $(run) -m pip --disable-pip-version-check
other      := $(if $(filter cuda13,$(EXTRA)),cupy-cuda12x,cupy-cuda13x)
ready_demo := $(env)/demo
ready_test := $(env)/test
ready_lint := $(env)/lint
endif

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(ready_demo)
	$(run) examples/quickstart.py $(ARGS)

test: $(ready_test)
	$(run) -m pytest $(ARGS)

bench: $(ready_test)
	$(run) -m gsbn bench --preset kernelbench --publish . $(ARGS)

lint: $(ready_lint)
	$(bin)ruff check .
	$(bin)ruff format --check .
	$(bin)mypy
	$(bin)clang-format --dry-run --Werror kernels/*

format: $(ready_lint)
	$(bin)ruff check --fix .
	$(bin)ruff format .
	$(bin)clang-format -i kernels/*

clean:
	rm -rf .venv build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache

ifneq ($(strip $(VENV)),)
# One CuPy wheel an environment: another driver, and so another extra, starts the set-up again.
$(env)/$(EXTRA):
	$(PYTHON) -m venv $(VENV)
	rm -rf $(env)
	$(pip) uninstall --quiet --quiet --yes $(other)
	mkdir -p $(env)
	touch $@

$(ready_demo): pyproject.toml $(env)/$(EXTRA)
	$(pip) install --quiet --editable '.[$(EXTRA)]'
	touch $@

$(ready_test): pyproject.toml $(env)/$(EXTRA)
	$(pip) install --quiet --editable '.[$(EXTRA),test]'
	touch $@ $(ready_demo)

$(ready_lint): pyproject.toml $(env)/$(EXTRA)
	$(pip) install --quiet --editable '.[dev]'
	touch $@
endif
