# Two commands on a fresh machine with Python 3.11+:
#   make demo    train the demo model from a schedule, beside its prediction (about 5 minutes, installing included)
#   make test    run all tests
# TORCH_INDEX=URL takes torch (and nothing else) from that package index, e.g. one that has CPU-only builds.
PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
# Hundreds of processes import torch in the tests: with its bytecode kept that takes 2.4 s, not 6.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test install clean

demo: .venv/.installed
	$(BIN)/python -m experiments.demo

test: .venv/.tested
	$(BIN)/python -m pytest -n 3 --dist worksteal --nbmake tests notebooks

install: .venv/.installed

.venv/.torch: Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	touch $@

.venv/.installed: .venv/.torch requirements.lock pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

.venv/.tested: .venv/.installed requirements-test.lock
	$(BIN)/python -m pip install --quiet --no-compile -r requirements-test.lock
	touch $@

clean:
	rm -rf .venv build *.egg-info
