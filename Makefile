# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# Where pip takes the CPU build of torch from, if the default index would bring another one, e.g.
#   TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu" make demo
TORCH_ARGS ?=
DEMO_ARGS ?=
# The oldest supported lightning, beside the newest that the constraints name.
OLDEST_LIGHTNING := 2.6.4
OLDEST := $(VENV)/oldest
# Two processes; each file stays in one of them, and files are handed out in the order of tests/conftest.py.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 4

.PHONY: install demo test test-oldest lint types docs pytest wheel clean help

help:
	@echo "make demo   train the example through the fault parade; DEMO_ARGS=\"key=value ...\" are Hydra overrides"
	@echo "make test   lint, types, documentation and every test; PYTEST_ARGS=\"-k name\" narrows the tests"
	@echo "make test-oldest   rollback, resume and the private names on lightning $(OLDEST_LIGHTNING)"

# torch comes first, so that nothing else pulls another build of it in.
$(VENV)/.installed: constraints.txt pyproject.toml
	@echo "making $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH_ARGS) -c constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[report,data,dev,docs]"
	@touch $@

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(PY) examples/pretrain.py experiment=parade $(DEMO_ARGS)

test: $(VENV)/.installed lint types docs pytest

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed
	$(VENV)/bin/mypy

# Strict: a link that leads nowhere, or a docstring that can't be read, is an error.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

pytest: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

# Only lightning is installed there; everything else, torch above all, is borrowed from the first environment.
$(OLDEST)/.installed: $(VENV)/.installed
	$(PY) -m venv --clear --without-pip $(OLDEST)
	$(PY) -m pip --disable-pip-version-check --python $(OLDEST)/bin/python install --quiet --no-deps \
		lightning==$(OLDEST_LIGHTNING)
	$(PY) -c "import sysconfig; print('$(CURDIR)', sysconfig.get_paths()['purelib'], sep='\n')" > \
		"$$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/borrowed.pth"
	$(OLDEST)/bin/python -c "import lightning as L; assert L.__version__ == '$(OLDEST_LIGHTNING)', L.__version__"
	@touch $@

# The tests that depend on what Lightning keeps to itself: the matrix of rollback and resume, and every private name.
test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(PYTEST_ARGS) tests/state

wheel: $(VENV)/.installed
	$(PY) -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
