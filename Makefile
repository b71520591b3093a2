# make demo: set up and show the main job.   make test: set up and run every test that needs no browser.
# make test-browser: those that open the report in Chromium.
#
#   PYTHON=python3.12     the interpreter to use (3.11 or newer)
#   PIP_OPTIONS="..."     handed to every pip call, e.g. an index with CPU builds of torch:
#                         make demo PIP_OPTIONS="--index-url ..."

PYTHON ?= python3
PIP_OPTIONS ?=
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-browser lint wheel clean

demo: $(STAMP)
	$(BIN)/hspec demo

test: $(STAMP)
	$(BIN)/python -m pytest

test-browser: $(STAMP)
	$(BIN)/python -m pytest -m browser tests/evaluation

lint: $(STAMP)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

wheel: $(STAMP)
	$(BIN)/python -m pip wheel --no-deps -w dist .

$(STAMP): pyproject.toml constraints.txt requirements-oracle.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is older: set PYTHON=python3.12, say"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "cannot make .venv: on Debian or Ubuntu, apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --no-deps -r requirements-oracle.txt
	@touch $(STAMP)

clean:
	rm -rf .venv build dist
