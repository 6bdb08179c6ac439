# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# Where pip takes the CPU build of torch from, if the default index would bring another one, e.g.
#   TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu" make demo
TORCH_ARGS ?=
DEMO_ARGS ?=
# Two processes; each file stays in one of them.
PYTEST_ARGS ?= -n 2 --dist loadfile

.PHONY: demo test lint types pytest wheel clean help

help:
	@echo "make demo   train the example through the fault parade; DEMO_ARGS=\"key=value ...\" are Hydra overrides"
	@echo "make test   lint, types and every test; PYTEST_ARGS=\"-k name\" narrows the tests"

# torch comes first, so that nothing else pulls another build of it in.
$(VENV)/.installed: constraints.txt pyproject.toml
	@echo "making $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH_ARGS) -c constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[report,data,dev]"
	@touch $@

demo: $(VENV)/.installed
	$(PY) examples/pretrain.py experiment=parade $(DEMO_ARGS)

test: $(VENV)/.installed lint types pytest

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed
	$(VENV)/bin/mypy

pytest: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

wheel: $(VENV)/.installed
	$(PY) -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
