# make demo | make test | make lint | make docs | make test-mlx-lm-0.31 | make test-vllm-mlx |
# make kill-loop | make clean
# Each makes the virtual environment it needs; nothing outside this folder is changed.

# The first interpreter that is new enough: on a Mac plain python3 may be too old.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	command -v $$p >/dev/null 2>&1 && \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' && echo $$p && break; done)

VENV := .venv
OLD_VENV := .venvs/mlx-lm-0.31
VLLM_VENV := .venvs/vllm-mlx
PIP_FLAGS := --quiet --disable-pip-version-check

# mlx's CPU wheel comes with a slow BLAS. Where Debian's OpenBLAS lies, it is put before it:
# a float32 matrix product takes a tenth of the time. On a Mac there is none and MLX uses Metal.
OPENBLAS := $(wildcard /usr/lib/$(shell uname -m)-linux-gnu/openblas-pthread/libopenblas.so.0)
RUN := $(if $(OPENBLAS),env LD_PRELOAD=$(OPENBLAS),)

ARGS ?=
PYTEST_ARGS ?= -q -n 2 --dist loadfile

.PHONY: demo test lint pytest kill-loop docs test-mlx-lm-0.31 test-vllm-mlx clean
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

# The cache classes and the server of mlx-lm changed in 0.32: what touches them runs under the
# older one too.
test-mlx-lm-0.31: $(OLD_VENV)/.dev
	$(RUN) $(OLD_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(ARGS) tests/cache \
		$(wildcard tests/serve/test_engine_*.py)

# serve --engine vllm-mlx and its backend, on the real vllm-mlx.
test-vllm-mlx: $(VLLM_VENV)/.dev
	$(RUN) $(VLLM_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(ARGS) tests/vllm_mlx

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(OLD_VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(OLD_VENV)

$(VLLM_VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VLLM_VENV)

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

clean:
	rm -rf $(VENV) .venvs .pytest_cache .mypy_cache .ruff_cache
