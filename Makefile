# make demo | make test | make lint | make docs | make test-mlx-lm-0.31 | make test-vllm-mlx |
# make test-torch | make kill-loop | make clean
# Each makes the virtual environment it needs; nothing outside this folder is changed.

# The first interpreter that is new enough: on a Mac plain python3 may be too old.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	command -v $$p >/dev/null 2>&1 && \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' && echo $$p && break; done)

VENV := .venv
OLD_VENV := .venvs/mlx-lm-0.31
VLLM_VENV := .venvs/vllm-mlx
TORCH_VENV := .venvs/torch
PIP_FLAGS := --quiet --disable-pip-version-check

# mlx's CPU wheel comes with a slow BLAS. Where Debian's OpenBLAS lies, it is put before it:
# a float32 matrix product takes a tenth of the time. On a Mac there is none and MLX uses Metal.
OPENBLAS := $(wildcard /usr/lib/$(shell uname -m)-linux-gnu/openblas-pthread/libopenblas.so.0)
RUN := $(if $(OPENBLAS),env LD_PRELOAD=$(OPENBLAS),)

ARGS ?=
PYTEST_ARGS ?= -q -n 2 --dist loadfile

# torch without its gigabytes of CUDA libraries; a Mac's wheel has none.
TORCH := $(if $(filter Linux,$(shell uname -s)),torch==2.13.0+cpu,torch)
TORCH_FLAGS := --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu

.PHONY: demo test lint pytest kill-loop docs test-mlx-lm-0.31 test-vllm-mlx test-torch clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	@$(RUN) $(VENV)/bin/python -m pion_vllm_mlx demo $(ARGS)

test: lint pytest

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

pytest: $(VENV)/.dev
	$(RUN) $(VENV)/bin/python -m pytest $(PYTEST_ARGS) $(ARGS)

# A server and workers killed 200 times each, under load: some minutes.
kill-loop: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -q -s --kills 200 tests/recovery/test_kill_loop.py $(ARGS)

# The manuals of the commands and of the flags, from their tables.
docs: $(VENV)/.dev
	$(VENV)/bin/python -m pion_vllm_mlx.server.command_docs docs/commands.md
	$(VENV)/bin/python -m pion_vllm_mlx.server.option_docs docs/server.md

# The cache classes and the server of mlx-lm changed in 0.32: what touches them, or replaces a
# function of its models, runs under the older one too.
test-mlx-lm-0.31: $(OLD_VENV)/.dev
	$(RUN) $(OLD_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(ARGS) tests/cache tests/patch \
		$(wildcard tests/serve/test_engine_*.py tests/serve/test_lineage_cache_*.py) \
		tests/serve/test_agent_trace.py tests/serve/test_killed_within.py \
		tests/serve/test_read_ahead.py tests/tools/test_prompt_file.py

# serve --engine vllm-mlx and its backend, on the real vllm-mlx.
test-vllm-mlx: $(VLLM_VENV)/.dev
	$(RUN) $(VLLM_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(ARGS) tests/vllm_mlx

# The attention layers for torch, and LMCache's own client, each on the real thing.
test-torch: $(TORCH_VENV)/.dev
	$(TORCH_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(ARGS) \
		tests/cache/test_externalized_torch.py tests/cache/test_lmcache_wheel.py

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(OLD_VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(OLD_VENV)

$(VLLM_VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VLLM_VENV)

$(TORCH_VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(TORCH_VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[mlx,dev]'
	@touch $@

$(OLD_VENV)/.dev: pyproject.toml | $(OLD_VENV)/bin/python
	$(OLD_VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[mlx,dev]' 'mlx-lm==0.31.3'
	@touch $@

# vllm-mlx asks for torchvision, opencv and gradio, gigabytes that text models do not use.
$(VLLM_VENV)/.dev: pyproject.toml | $(VLLM_VENV)/bin/python
	$(VLLM_VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[serve,dev]' 'mlx-lm<0.32' \
		fastapi requests jsonschema python-multipart
	$(VLLM_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps 'vllm-mlx==0.6.0'
	@touch $@

# LMCache asks for CUDA libraries that its client of a Redis server does not use. Neither it nor
# this torch has a wheel for every system: what cannot be installed here, its tests say they skip.
$(TORCH_VENV)/.dev: pyproject.toml | $(TORCH_VENV)/bin/python
	$(TORCH_VENV)/bin/python -m pip install $(PIP_FLAGS) -e '.[mlx,dev]'
	-$(TORCH_VENV)/bin/python -m pip install $(PIP_FLAGS) $(TORCH_FLAGS) '$(TORCH)' && \
		$(TORCH_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps 'lmcache==0.5.6' && \
		$(TORCH_VENV)/bin/python -m pip install $(PIP_FLAGS) aiofile aiohttp cachetools \
		cryptography msgspec numba py-cpuinfo pyzmq requests
	@touch $@

clean:
	rm -rf $(VENV) .venvs .pytest_cache .mypy_cache .ruff_cache
