# make demo: predict DeepSeek-V3 on 2,048 H800 (no GPU, no PyTorch). make test: everything that CI runs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.core
DEV    := $(VENV)/.dev

.PHONY: demo test test-all lint docs bench mutate clean

demo: $(STAMP)
	$(BIN)/piper-sim demo

# Ranks of several workers do not meet: each run has a store of its own. A file stays with one worker, which keeps what
# its tests share; files in their order, so that short ones come last and no worker waits for a long one; one worker more
# than there are cores, since ranks wait for each other; ratios of times are taken alone. Bytecode is written, for the
# many processes that tests start.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q
ASIDE  := -n $$(($$(nproc)+1)) --dist loadscope --no-loadscope-reorder --ignore=tests/bench

test: $(DEV) lint
	PIPER_EXAMPLES=160 $(PYTEST) -m "not slow" $(ASIDE)
	$(PYTEST) -m "not slow" tests/bench

# Clusters are started aside: they fill the machine. What slow tests start is installed here; that it is not there is an error.
test-all: $(DEV) lint
	command -v chromium >/dev/null || apt-get install -y -q chromium  # tests/piper_sim/report/test_browser.py
	PIPER_EXAMPLES=4000 $(PYTEST) $(ASIDE) --ignore=tests/clusters
	$(PYTEST) tests/bench
	.ci/schedulers
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-cpu.txt -e '.[ray]'  # tests/clusters/test_ray.py
	$(PYTEST) tests/clusters

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house.rules
	$(BIN)/python .ci/lock.py check

# The site, in site/: docs/, and a reference from the code. Strict: a link that leads nowhere stops it.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(STAMP)
	$(BIN)/python -m experiments.engine_speed
	$(BIN)/python -m experiments.command_speed

# N mutants of each folder, drawn by SEED, after those that have names: hours for many. Below 90 % of them killed: exit 1.
mutate: $(DEV)
	$(BIN)/python -m tests.mutate --n $(or $(N),30) --seed $(or $(SEED),0)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	$(BIN)/python -m piper_sim.app.warm
	touch $@

$(DEV): $(STAMP) constraints-cpu.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --dry-run --report $(VENV)/.torch.json -c constraints-cpu.txt torch
	$(if $(CUDA),,$(BIN)/python .ci/cpu_torch.py $(VENV)/.torch.json)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-cpu.txt -e '.[dev,exec]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps mlc-chakra==1.0.0  # whose reader needs protobuf; its viewers, 90 more
	touch $@

clean:
	rm -rf $(VENV) piper-sim-demo dist build site
