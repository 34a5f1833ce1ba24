# Everything runs in an environment of the project's own; nothing else needs to be installed first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: test test-slow lint demo bench opinfo clean

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy stowgrad

demo: $(READY)
	$(BIN)/python examples/demo.py

bench: $(READY)
	$(BIN)/python benchmarks/run.py

opinfo: $(READY)
	$(BIN)/python tools/opinfo.py

# The pins bring setuptools, so the package itself builds without fetching a second one.
$(READY): requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
