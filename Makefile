# Every target makes the virtual environment that it needs; nothing else has
# to be set up. PYTHON chooses the interpreter, VENV where environments go.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

# An environment for each set of extras, rebuilt when pyproject.toml changes.
STAMPS := $(foreach set,demo test lint bench docs,$(VENV)/$(set)/.stamp)
EXTRAS_demo := examples
EXTRAS_test := test,examples
EXTRAS_lint := lint
EXTRAS_bench := bench
EXTRAS_docs := docs,test

.PHONY: demo test test-core lint bench docs clean

demo: $(VENV)/demo/.stamp
	$(VENV)/demo/bin/python docs/examples/a2c_cartpole.py $(ARGS)

test: $(VENV)/test/.stamp
	$(VENV)/test/bin/python -m pytest -n $(JOBS) --dist loadscope $(ARGS)

# Without the examples and what only they need.
test-core: EXTRAS_test := test
test-core: $(VENV)/test/.stamp
	$(VENV)/test/bin/python -m pytest -n $(JOBS) --dist loadscope --ignore=tests/examples $(ARGS)

lint: $(VENV)/lint/.stamp
	$(VENV)/lint/bin/ruff check .
	$(VENV)/lint/bin/ruff format --check .
	$(VENV)/lint/bin/mypy

bench: $(VENV)/bench/.stamp
	$(VENV)/bench/bin/python -m benchmarks.bench_multi_grad $(ARGS)

docs: $(VENV)/docs/.stamp
	$(VENV)/docs/bin/python -m sphinx -W --keep-going -b html docs docs/_build/html

$(STAMPS): $(VENV)/%/.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)/$*
	$(VENV)/$*/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/$*/bin/python -m pip install --quiet -e '.[$(EXTRAS_$*)]'
	touch $@

clean:
	rm -rf $(VENV) build dist docs/_build
