# Two commands for a fresh machine: `make demo` shows the main job, `make test` runs the tests. Both set up
# everything they need. `make check` is what a change must pass.

PYTHON ?= python3
BIN := .venv/bin

# Hundreds of processes are started here: each would compile all that it imports where the environment, as in many
# images of containers, says to keep no bytecode.
export PYTHONDONTWRITEBYTECODE :=

# `captures`, `computed` and `searched` are parts of `test`, which runs them at a time.
.PHONY: demo test captures computed searched check format native sanitize fuzz explore bench docs clean

demo: .venv/.demo
	-@$(BIN)/python -m tracepipe.native
	@scripts/demo.sh

# Captures wait more than they compute, so what computes runs while they do, and lets them go first. Of captures, three
# files run at a time; those that are marked `alone`, and those of GPUs, have the machine to themselves.
test: .venv/.test native
	$(MAKE) --no-print-directory -j 3 $(if $(filter output-sync,$(.FEATURES)),--output-sync) captures computed searched
	$(BIN)/python -m pytest -m "alone or gpu" tests/integration tests/gpu

# The files begin in the order of tests/conftest.py, not of how many tests they have.
captures: .venv/.test native
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not alone" tests/integration

# One process more than there are processors, as some tests wait.
computed: .venv/.test native
	nice -n 19 $(BIN)/python -m pytest -n $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)') --dist worksteal tests/unit tests/cli tests/golden tests/fuzz

# One process at a time, which leaves most of the processors to the tests.
searched: .venv/.test native
	nice -n 19 $(BIN)/python benchmarks/identical.py 100000
	nice -n 19 $(BIN)/python -m tests.native.sanitize --seconds 30
	nice -n 19 $(BIN)/python -m tests.fuzz.run --seconds 22
	nice -n 19 $(BIN)/python -m tests.fuzz.run --programs --seconds 8

check: .venv/.test native
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: .venv/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The inner loops in C, where a source of theirs has changed. Without a compiler all runs in Python.
native: .venv/.test
	@$(BIN)/python -m tracepipe.native

# The core once more, under the address and undefined-behaviour sanitizers, on random input.
sanitize: .venv/.test
	$(BIN)/python -m tests.native.sanitize

# Mutated recordings through every reader, converter, report and command; and mutated programs and libraries.
fuzz: .venv/.test native
	$(BIN)/python -m tests.fuzz.run
	$(BIN)/python -m tests.fuzz.run --programs

# Other examples of the properties than those that each run of the tests tries, and constructs of inputs that are
# repeated until time or memory grows faster than the input.
explore: .venv/.test native
	$(BIN)/python -m pytest -n auto -m "hypothesis and not alone" --hypothesis-profile explore tests/unit tests/cli tests/golden
	$(BIN)/python -m tests.fuzz.growth --seconds 600 --seed $$(date +%s) --on

bench: .venv/.test native
	$(BIN)/python benchmarks/convert.py

# The documentation as a site, build/docs. A link that leads nowhere is an error.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

clean:
	rm -rf build dist .venv .venv-docs *.egg-info tracepipe/native/core.so

.venv/.demo: pyproject.toml constraints.txt setup.py scripts/setup.sh
	@PYTHON=$(PYTHON) scripts/setup.sh demo
	@touch $@

.venv/.test: pyproject.toml constraints.txt setup.py scripts/setup.sh
	@PYTHON=$(PYTHON) scripts/setup.sh test
	@touch $@ .venv/.demo

.venv-docs/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@
