# Two commands for a fresh machine: `make demo` shows the main job, `make test` runs the tests. Both set up
# everything they need. `make check` is what a change must pass.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format bench clean

demo: .venv/.demo
	@scripts/demo.sh

# Captures and the tests of their rates have the machine to themselves.
test: .venv/.test
	$(BIN)/python -m pytest -n auto --dist loadfile tests/unit tests/cli tests/golden
	$(BIN)/python -m pytest tests/integration tests/gpu

check: .venv/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: .venv/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.test
	$(BIN)/python benchmarks/convert.py

clean:
	rm -rf build dist .venv *.egg-info

.venv/.demo: pyproject.toml scripts/setup.sh
	@PYTHON=$(PYTHON) scripts/setup.sh demo
	@touch $@

.venv/.test: pyproject.toml scripts/setup.sh
	@PYTHON=$(PYTHON) scripts/setup.sh test
	@touch $@ .venv/.demo
