# make demo    run the main job: both KernelBench problems, full size on a GPU, reduced on a CPU
# make test    run the tests, 9 minutes on two cores; GPU tests skip, and say why, where there is no GPU
# make kernels compile every kernel for every architecture; needs no GPU, but NVIDIA's compiler, which it installs
# make bench   time gsbn beside its peers, rewrite the tables in README.md and docs/results.md, and docs/results/
# make ranks   of these the table of two GPUs that share a batch; part of bench where there are two
# make docs    build the site of docs/ and the docstrings into build/docs/
# make wheel   build the wheel into dist/
# make lint    ruff, mypy, pyright, clang-format; changes nothing
# make format  let ruff and clang-format rewrite the sources
# make clean   remove what the targets above made
#
# Each target sets up what it needs in a virtual environment, once.
#   PYTHON=python3.12   the interpreter that makes the environment
#   VENV=path           where the environment lies; `VENV=` (empty) uses PYTHON as it is and installs nothing
#   EXTRA=cuda13        the extra to install, cuda12 or cuda13; the default asks the NVIDIA driver, and is none without one
#   ARGS='-m gpu -x'    more arguments for demo, test, bench or ranks
#   WORKERS=8           processes that share the tests; WORKERS= (empty), as with VENV=, is one, without pytest-xdist
#   KERNELBENCH_ROOT=path   a checkout of KernelBench: bench asks its evaluator, too

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
WORKERS ?= $(if $(strip $(VENV)),2)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test tell_test kernels bench ranks docs wheel lint format clean

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
base       := $(env)/$(or $(EXTRA),cpu)
pip        := $(run) -m pip --disable-pip-version-check
comma      := ,
ready_demo    := $(env)/demo
ready_test    := $(env)/test
ready_kernels := $(env)/kernels
ready_docs    := $(env)/docs
ready_lint    := $(env)/lint
endif

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(ready_demo)
	$(run) examples/quickstart.py $(ARGS)

test: tell_test $(ready_test)
	$(run) -m pytest $(if $(WORKERS),-n $(WORKERS) --dist worksteal) $(ARGS)

tell_test:
ifneq ($(strip $(VENV)),)
	@echo "make test: installs PyTorch, MPICH, scikit-learn, matplotlib, pytest and more into $(VENV) once, 1.4 GB$(if \
		$(EXTRA), and CUDA$(comma) as PyTorch and CuPy bring it)."
endif
	@echo "make test: the tests take about 9 minutes on two cores without a GPU. ARGS=tests/api runs some of them."

kernels: $(ready_kernels)
	$(run) -m pytest tests/kernels/test_compile.py $(ARGS)

# The tables of docs/results.md, spread over all GPUs (--gpus 0). Only what has a column is timed.
once = --turns 1 --seconds 0.25 --settle 0.15
brief = --turns 2 --seconds 0.25 --settle 0.15
two = --dtype float32 --dtype bfloat16
step = --direction step --only gsbn,pytorch,compile
forward = --only gsbn,pytorch,compile,gemm-torch,gemm-lt,gemm-cupy
inference = 256,104,200 16,8192,8192 256,8192,8192 1024,8192,8192 512,16384,1024 10000,336,776 65536,256,512 1048576,64,64
others = triton-tf32x3,triton-bf16x6,jax,jax-tf32x3,jax-bf16x6,jax-bf16x9
table_kernelbench = --preset kernelbench $(brief) $(forward),$(others)
products = 512,512,512 2048,2048,2048 4096,4096,4096 1024,8192,8192 16384,4096,4096 128,8192,8192 65536,256,512 \
	8192,64,1024 300,2000,1000 2047,2049,2051
table_matmul = $(products:%=--shape %) --dtype float32 $(brief) \
	--only gsbn-matmul,gemm-torch,gemm-lt,gemm-cupy,gemm-jax-tf32x3,gemm-jax-bf16x6
table_autotune = --shape 1024,8192,8192 --shape 16384,4096,4096 $(two) $(brief) --only gsbn,pytorch,compile,autotune
table_step = --preset kernelbench $(brief) $(step)
table_many = --preset many $(two) $(brief) $(forward)
table_few = --preset few $(two) $(brief) $(forward)
table_many_step = --preset many $(two) $(brief) $(step)
table_few_step = --preset few $(two) $(brief) $(step)
table_inference = $(inference:%=--shape %) --mode inference $(two) $(brief) --only gsbn,pytorch,compile,addmm
table_models = --preset models $(once)
table_convolutions = --preset convolutions $(two) $(once)
tables = kernelbench matmul autotune step many few many_step few_step inference models convolutions

# Programs whose output goes into docs/results.md as it is
text_evaluator = examples/kernelbench_time.py
text_compare = examples/compare_models.py --seconds 0.25
text_barlow_twins = examples/barlow_twins_head.py --convert --rows 2048 --width 8192 --bfloat16 --steps 150 \
	--plot docs/results/barlow_twins.png
texts = evaluator compare barlow_twins

bench: $(tables:%=table-%) $(texts:%=table-%)
	if [ "$$(nvidia-smi --list-gpus | wc -l)" -ge 2 ]; then $(MAKE) ranks; fi

table-%: $(ready_test)
	$(run) -m gsbn bench $(table_$*) --gpus 0 --json docs/results/$*.json $(ARGS)
	$(run) tools/publish.py $*

$(texts:%=table-%): table-%: $(ready_test)
	mkdir -p build
	$(run) $(text_$*) > build/$*.txt
	$(run) tools/publish.py --text $* < build/$*.txt

ranks: $(ready_test)
	$(run) -m gsbn bench --ranks 2 --seconds 0.6 --settle 0.3 --json docs/results/ranks.json $(ARGS)
	$(run) tools/publish.py ranks

docs: $(ready_docs)
	$(run) -m sphinx -E -W -q docs build/docs

wheel:
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

lint: $(ready_lint)
	$(bin)ruff check .
	$(bin)ruff format --check .
	$(bin)mypy
	$(bin)pyright --pythonpath $(bin)python
	PYTHONPATH=$(CURDIR) $(bin)pyright --pythonpath $(bin)python --verifytypes gsbn --ignoreexternal --outputjson \
		| $(bin)python tools/known_types.py
	$(bin)clang-format --dry-run --Werror $$(find kernels -name '*.cu*')

format: $(ready_lint)
	$(bin)ruff check --fix .
	$(bin)ruff format .
	$(bin)clang-format -i $$(find kernels -name '*.cu*')

clean:
	rm -rf .venv .venv-kernels build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache

ifneq ($(strip $(VENV)),)
# One CuPy wheel an environment: another driver, and so another extra, starts the set-up again.
$(base):
	$(PYTHON) -m venv $(VENV)
	rm -rf $(env)
	$(pip) uninstall --quiet --quiet --yes cupy-cuda12x cupy-cuda13x
	mkdir -p $(env)
	touch $@

$(ready_demo): pyproject.toml $(base)
	$(pip) install --quiet --editable '.$(if $(EXTRA),[$(EXTRA)])'
	touch $@

# Without an NVIDIA driver, PyTorch of its own index for CPUs: the usual one for Linux brings gigabytes of CUDA.
$(ready_test): pyproject.toml $(base)
ifeq ($(EXTRA)$(shell uname -s),Linux)
	-$(pip) install --quiet --retries 1 --index-url https://download.pytorch.org/whl/cpu \
		$$(sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
endif
	$(pip) install --quiet --editable '.[$(if $(EXTRA),$(EXTRA)$(comma))test]'
	touch $@ $(ready_demo)

$(ready_kernels): pyproject.toml $(base)
	$(pip) install --quiet --editable '.[$(if $(EXTRA),$(EXTRA)$(comma)test,kernels)]'
	touch $@

$(ready_docs): pyproject.toml $(base)
	$(pip) install --quiet --editable '.[docs]'
	touch $@

$(ready_lint): pyproject.toml $(base)
	$(pip) install --quiet --editable '.[dev]'
	touch $@
endif
