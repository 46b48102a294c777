# The verbs of development; CI runs the same ones. Each does whatever set-up it needs, once.
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-gpu test-use opinfo models fuzz fuzz-gpu fuzz-gpu-attention fuzz-programs fuzz-loops fuzz-gpu-programs bench bench-gpu ablation docs screenshots lint format clean tree

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# mypy and import-linter read folders, not the editable install's finder: here the packages lie as they are imported.
TREE := out/tree
FROM_TREE := cd $(TREE) && $(CURDIR)/$(BIN)
SOURCES := kgen lowering scheduler templates tests bench examples tools
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -p no:benchmark
BENCH_ARGS ?=
DEMO_ARGS ?=
FUZZ_EXAMPLES ?= 300
JOBS ?= 16
SHARD ?= 1/1
FUZZ_MINUTES ?= 9
FUZZ_ARGS ?=
OPINFO_ARGS ?=
MODELS_ARGS ?=
# A GPU machine may have no virtual environment, only kgen installed for its own Python.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

help:
	@echo "make demo       compile and train a small GPT: checked against eager, timed against eager and Inductor (DEMO_ARGS='--size full')"
	@echo "make test       the fast tests (what CI runs)"
	@echo "make test-full  all tests this machine can run"
	@echo "make test-use   what people meet: an install in an empty environment, type checkers, pages in a browser, the site"
	@echo "make test-gpu   the tests that need a GPU (SHARD=1/4: the first of four parts)"
	@echo "make fuzz       property tests with many more examples (FUZZ_EXAMPLES=$(FUZZ_EXAMPLES))"
	@echo "make fuzz-gpu   contractions by every candidate kernel on a GPU, against float64 (SHARD=1/4, FUZZ_MINUTES=9, FUZZ_ARGS=...)"
	@echo "make fuzz-gpu-attention  attention of 400 seeds with gradients, by random configurations of its templates, against float64 (FUZZ_ARGS=...)"
	@echo "make fuzz-programs      5,000 random programs and 1,000 with gradients on the CPU (FUZZ_ARGS=...)"
	@echo "make fuzz-loops         10,000 random loops by PyTorch's operators, 2,000 by kernels, 1,000 that tensors decide (FUZZ_ARGS=...)"
	@echo "make fuzz-gpu-programs  500 random programs on a GPU, half with gradients (JOBS=$(JOBS), FUZZ_ARGS=...)"
	@echo "make opinfo     operators of torch's test database against eager, forward, gradient, in-place, out= (SHARD=1/8, OPINFO_ARGS=...)"
	@echo "make models     whole models: eager, Inductor, kgen; errors, times, compile seconds (MODELS_ARGS='--device cuda --size base')"
	@echo "make bench      memory-bound CPU patterns: eager, Inductor, kgen (BENCH_ARGS=...)"
	@echo "make bench-gpu  matmuls on a GPU: eager, cuBLAS, Inductor, kgen; then a report in out/bench (BENCH_ARGS=...)"
	@echo "make ablation   what each optimisation is worth (BENCH_ARGS=...)"
	@echo "make docs       the documentation as a site, in out/site"
	@echo "make screenshots  pages of reports in out/screenshots (needs a Chromium)"
	@echo "make lint       ruff, mypy, import-linter, private terms (tools/vocabulary.py)"
	@echo "make format     ruff format and safe fixes"
	@echo "make clean      remove build products and caches (keeps $(VENV))"

setup: $(STAMP)

# An environment of before has the distribution under its old name, kgen.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) tools/check_machine.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/python -m pip uninstall --quiet --quiet --yes kgen
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[gpu,bench,dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m examples.transformer $(DEMO_ARGS)

test: $(STAMP)
	$(PYTEST) -m "not slow and not gpu" tests

test-full: $(STAMP)
	$(PYTEST) tests

test-use: $(STAMP) docs
	$(BIN)/python -m tools.check_install
	$(BIN)/python -m pytest -q -p no:benchmark tests/test_user_types.py tests/report/test_page.py -k "pyright or snippet or right_code or browser"

test-gpu: $(STAMP)
	$(PYTEST) -m gpu --shard $(SHARD) tests

fuzz: $(STAMP)
	KGEN_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PYTEST) -k fuzz tests

fuzz-gpu:
	$(GPU_PYTHON) -m tests.fuzz_contractions --out out/fuzz-gpu --shard $(SHARD) --minutes $(FUZZ_MINUTES) $(FUZZ_ARGS)

fuzz-gpu-attention:
	$(GPU_PYTHON) -m tests.fuzz_attention $(FUZZ_ARGS)

fuzz-programs: $(STAMP)
	$(BIN)/python -m tests.fuzz_programs --programs 5000 --jobs $(WORKERS) $(FUZZ_ARGS)
	$(BIN)/python -m tests.fuzz_programs --gradients --programs 1000 --jobs $(WORKERS) $(FUZZ_ARGS)

fuzz-loops: $(STAMP)
	KGEN_FALLBACK=all $(BIN)/python -m tests.fuzz_programs --loops --programs 7000 --jobs $(WORKERS) $(FUZZ_ARGS)
	KGEN_FALLBACK=all $(BIN)/python -m tests.fuzz_programs --loops --gradients --programs 3000 --jobs $(WORKERS) $(FUZZ_ARGS)
	$(BIN)/python -m tests.fuzz_programs --loops --programs 1000 --jobs $(WORKERS) $(FUZZ_ARGS)
	$(BIN)/python -m tests.fuzz_programs --loops --gradients --programs 1000 --jobs $(WORKERS) $(FUZZ_ARGS)
	$(BIN)/python -m tests.fuzz_programs --control-flow --programs 700 --jobs $(WORKERS) $(FUZZ_ARGS)
	$(BIN)/python -m tests.fuzz_programs --control-flow --gradients --programs 300 --jobs $(WORKERS) $(FUZZ_ARGS)

fuzz-gpu-programs:
	$(GPU_PYTHON) -m tests.fuzz_programs --device cuda --programs 250 --jobs $(JOBS) $(FUZZ_ARGS)
	$(GPU_PYTHON) -m tests.fuzz_programs --device cuda --gradients --programs 250 --jobs $(JOBS) $(FUZZ_ARGS)

opinfo: $(STAMP)
	$(BIN)/python -m tests.opinfo --jobs $(WORKERS) --shard $(SHARD) $(OPINFO_ARGS)

models:
	$(GPU_PYTHON) -m tests.models $(MODELS_ARGS)

bench: $(STAMP)
	$(BIN)/python -m bench.compare $(BENCH_ARGS)

bench-gpu: $(STAMP)
	$(BIN)/python -m bench.gpu_matmuls --json out/bench/matmuls.json --append $(BENCH_ARGS)
	$(BIN)/python -m bench.report out/bench/matmuls.json --out out/bench

ablation: $(STAMP)
	$(BIN)/python -m bench.ablation --json out/bench/ablation.json $(BENCH_ARGS)

tree:
	@rm -rf $(TREE) && mkdir -p $(TREE)/kgen
	@ln -s $(CURDIR)/kgen/* $(CURDIR)/lowering $(CURDIR)/scheduler $(CURDIR)/templates $(TREE)/kgen/

# The site in out/site, without a warning. Its pages of names, options and errors are written from the code.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]' --no-build-isolation
	$(BIN)/python -m tools.reference_docs --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Pages of reports (a GPT step, a ResNet, a GPU graph) as a headless Chromium draws them, in out/screenshots.
screenshots: $(STAMP)
	SCREENSHOTS=out/screenshots $(BIN)/python -m pytest -q -p no:xdist tests/report/test_page.py -k browser

lint: $(STAMP) tree
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(FROM_TREE)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p kgen
	$(FROM_TREE)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache
	$(BIN)/python -m tools.vocabulary

format: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf out build/lib build/bdist.* dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
