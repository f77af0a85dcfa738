# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOT := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n)

.PHONY: demo test test-scale attack lint docs site browser clean

demo: $(VENV)/.demo
	$(BIN)/diptych demo

test: $(VENV)/.test browser lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# What needs minutes or other servers (tests/scale): Milvus in a network namespace of its own, Ray, torchrun; after make test, both in 30 minutes.
test-scale: $(VENV)/.scale
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/scale

# Half an hour of hostile input for every reader, model folder, index file, route and parser; see SECURITY.md.
# `make attack DOCS=--docs` writes both tables into docs/reliability.md.
attack: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python tests/attack/watch.py --minutes 30 --least 20000 $(DOCS); found=$$?; \
	OMP_NUM_THREADS=1 $(BIN)/python tests/attack/wire.py $(DOCS) && exit $$found

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tables in the docs that are made from the code.
docs: $(VENV)/.test
	$(BIN)/python tests/generated_docs.py

# README, docs, notebooks and the API reference as pages: site/index.html. Notebooks are executed, every warning is an error.
site: $(VENV)/.docs
	$(BIN)/sphinx-build -q -W --keep-going -c docs . site
	ln -sf README.html site/index.html

$(BIN)/python:
	$(PYTHON) -c "import sys; sys.exit('Diptych needs Python 3.11 or newer: make PYTHON=python3.11') if sys.version_info < (3, 11) else None"
	@echo "making the environment $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml
	@echo "installing Diptych and its packages into $(VENV): torch is large, this can take minutes"
	$(BIN)/python -m pip install --progress-bar on --editable ".[demo]"
	touch $@

$(VENV)/.test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --progress-bar on --editable ".[test]"
	touch $@ $(VENV)/.demo

$(VENV)/.docs: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --progress-bar on --editable ".[demo,docs]"
	touch $@ $(VENV)/.demo

$(VENV)/.scale: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --progress-bar on --editable ".[test,scale]"
	touch $@ $(VENV)/.test $(VENV)/.demo

# The page is tested in a real browser: Debian's, where the machine has none.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || $(ROOT) sh -c "apt-get update -qq && apt-get install -qq -y chromium" \
	  || echo "no chromium: the browser's tests will be skipped (and fail where CI=true)"

clean:
	rm -rf $(VENV) demo runs site
