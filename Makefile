# make quickstart: a GRPO campaign on this machine, from nothing. make test: all tests. Both install what they need.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(if $(shell command -v $(p) 2>/dev/null),$(p))))
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
export HEADRACE_HOME ?= $(HOME)/.headrace
MODEL := $(HEADRACE_HOME)/models/smollm2-135m-instruct
export HF_HUB_OFFLINE ?= 1
export DO_NOT_TRACK ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: quickstart test lint install dev model vllm-env down clean lock

quickstart: install model
	@$(BIN)/headrace run quickstart --up

# Most tests wait for processes, so two files at a time, in the order of tests/conftest.py; vLLM's among themselves.
test: dev model vllm-env
	$(PYTEST) -m 'not vllm'
	HEADRACE_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python $(PYTEST) -m vllm --durations=5

lint: dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright --pythonpath $(BIN)/python

install: $(VENV)/.installed-cpu
dev: $(VENV)/.installed-dev
vllm-env: $(VLLM_VENV)/.installed

$(VENV)/.installed-cpu: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("Headrace needs Python 3.11 or newer; give one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c requirements.lock -e '.[cpu]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-cpu
	$(BIN)/python -m pip install -q -c requirements.lock -e '.[cpu,s3,nixl,delta,dev]'
	touch $@

# vLLM pins other packages than Prefect: an environment of its own. torchvision and its kin break beside a CPU torch.
$(VLLM_VENV)/.installed: requirements-vllm.lock
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q -r requirements-vllm.lock
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

model: $(VENV)/.installed-cpu
	@$(BIN)/python -m headrace.deployments.smollm2 $(MODEL)

down:
	$(BIN)/headrace down

lock:
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip compile -q --universal --python-version 3.11 --extra cpu --extra s3 --extra nixl --extra delta --extra dev --no-annotate --no-header pyproject.toml -o requirements.lock

clean:
	rm -rf $(VENV) $(VLLM_VENV)
