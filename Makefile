# Everything runs in .venv, which the first target that needs it sets up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT := out

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu fuzz faults check format bench bench-gpu clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## set up .venv with everything that development needs

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,hf,onnx,bench,track,cluster]'
	@touch $@

demo: $(READY)  ## place NASNet-A, and in one line Inception-V3, on two cores of this machine, really measured
	@mkdir -p $(OUT)
	$(BIN)/placer optimize graphs/models/nasnet.py:build --devices core:0,core:1 --budget 5s --measure-budget 15s \
		--out $(OUT)/placement.json --report $(OUT)/report.html
	@printf '\nInception-V3. '
	@$(BIN)/placer optimize graphs/models/inception.py:build --inference --devices core:0,core:1 --budget 2s --quiet \
		--out $(OUT)/inception.json

test: $(READY)  ## run the fast tests
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu"

test-all: $(READY)  ## run the slow tests too
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not gpu"

test-gpu: $(READY)  ## run the tests that need a CUDA device; without one they are skipped
	$(BIN)/python -m pytest -q -m gpu

MINUTES ?= 5
COUNT ?= 500

fuzz: $(READY)  ## mutated files and random examples (MINUTES=5, FILES=10000, SEED=1)
	$(BIN)/python -m tests.campaigns.fuzz --minutes $(MINUTES) $(if $(FILES),--files $(FILES)) \
		$(if $(SEED),--seed $(SEED))

faults: $(READY)  ## kill, stop and starve jobs: is anything lost or left? (COUNT=500 SEED=1)
	$(BIN)/python -m tests.campaigns.faults --count $(COUNT) $(if $(SEED),--seed $(SEED))

check: $(READY)  ## lint, format, types, floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## run all benchmarks into benchmarks/results and docs/benchmarks.md, some hours
	$(BIN)/python -m benchmarks --out benchmarks/results --markdown docs/benchmarks.md

bench-gpu: $(READY)  ## measure everything that needs a GPU, in 8 minutes; elsewhere on a fake one
	@mkdir -p $(OUT)
	$(BIN)/python -m benchmarks.gpu --out $(OUT)/gpu.json

clean:  ## remove what the targets made
	rm -rf $(VENV) $(OUT) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
