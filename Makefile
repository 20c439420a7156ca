# `make demo` and `make test` need only Python and make: the first target that needs it makes .venv.

PYTHON ?= python3
# More arguments for pip, such as PIP_ARGS="--index-url ..." for a mirror or another build of torch.
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q $(PIP_ARGS)
CHECKED := $(wildcard src tests benchmarks examples docs/*.py)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full fuzz fuzz-limits zoo lint format docs pages pictures bench clean

help:
	@echo "make setup      create .venv with everything installed (the other targets do it when needed)"
	@echo "make demo       plan Llama 3 8B on eight H100s, verify a small one, train a GPT on four local ranks"
	@echo "make test       run the tests, on two cores"
	@echo "make test-full  run also the tests that are slow or exhaustive"
	@echo "make fuzz       10,000 generated modules, original and parallel; stopped, it goes on where it was"
	@echo "make fuzz-limits  10,000 random problems with limits, searched and solved by HiGHS; stopped, it goes on where it was"
	@echo "make zoo        plan and verify a small model of every type of transformers; stopped, it goes on where it was"
	@echo "make lint       ruff and pyright"
	@echo "make format     let ruff format the code and fix what it can"
	@echo "make docs       build the documentation into build/site, and write the table of rooms in CONTRIBUTING.md"
	@echo "make pages      run the commands in README.md and docs/, and write what they print into these pages"
	@echo "make pictures   take the pictures of the report in docs/ anew"
	@echo "make bench      run the benchmarks and write docs/results.md; stopped, it goes on where it was"
	@echo "make clean      remove .venv, caches and built files"


setup: $(STAMP)

# torch comes first and by its exact version, and the package is built inside .venv rather than in an
# isolated build environment: so no step can bring in another torch.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/pip || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV); the first time this takes a minute or more"
	@$(INSTALL) -c constraints.txt setuptools wheel
	@$(INSTALL) -c constraints.txt torch==2.13.0
	@$(INSTALL) -c constraints.txt --no-build-isolation -e '.[hf,dev]'
	@touch $@

SMALL := --set num_hidden_layers=2 --set hidden_size=64 --set intermediate_size=128 --set num_attention_heads=4 \
	--set num_key_value_heads=2 --set vocab_size=256 --batch 4 --seq 16

demo: setup
	@mkdir -p build
	$(BIN)/tapas plan llama3-8b --mesh 2x4 --cluster h100-sxm --batch 16 --report build/llama3-8b.html
	@echo
	@echo "A small one, on four local processes: does the parallel program compute what the model computes?"
	$(BIN)/tapas verify hf:llama --mesh 2x2 --pin '*=megatron' $(SMALL)
	@echo
	@echo "And trained: a GPT on the characters of this repository's license, on four local processes."
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --mesh 2x2 --steps 100
	@echo
	@echo "The report of the plan, for a browser: build/llama3-8b.html"

# Most tests compute on one core. Groups go out in the order that tests/conftest.py gives them.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

test: setup
	$(PYTEST)

test-full: setup
	$(PYTEST) -m "" --hypothesis-profile full

FUZZ ?=
fuzz: setup
	$(BIN)/python -m tests.faithful.fuzz $(FUZZ)

fuzz-limits: setup
	$(BIN)/python -m tests.search.fuzz $(FUZZ)

ZOO ?=
zoo: setup
	$(BIN)/tapas zoo $(ZOO) --output .zoo.jsonl --page docs/zoo.md --jobs $(WORKERS)

lint: setup
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix $(CHECKED)
	$(BIN)/ruff format $(CHECKED)

docs: setup
	$(BIN)/python -m tests.test_docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The documentation, for a browser: build/site/index.html"

PAGES ?= README.md $(shell grep -rl '^```console' docs --include='*.md')
pages: setup
	$(BIN)/python -m tests.pages --write $(PAGES)

# Chromium takes them; what they show are the figures of now.
pictures: setup
	@mkdir -p build
	$(BIN)/tapas report llama3-8b --mesh 2x4 --cluster h100-sxm --batch 16 -o build/llama3-8b.html
	$(BIN)/python -m tests.report.pictures build/llama3-8b.html docs

# All of them, or those of BENCH="scaling running". AutoParallel is compared where TAPAS_AUTOPARALLEL names a checkout.
BENCH ?=
bench: setup
	$(BIN)/python benchmarks/results.py $(BENCH)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .fuzz src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
