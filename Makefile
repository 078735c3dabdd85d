# Each target does the set-up that it needs, and is quick the second time.

PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/disagg.yaml
GRAPH ?= graphs.disagg:Frontend
ARGS ?=

.PHONY: help setup serve check test test-all soak bench

help:
	@echo 'make setup     virtual environment, dependencies, tiny model'
	@echo 'make serve     start $(GRAPH) with $(CONFIG) (ARGS="--Frontend.port=8080")'
	@echo 'make check     lint, format, types, and the tests of pages and layers'
	@echo 'make test      the checks and the core of the tests'
	@echo 'make test-all  the checks and all tests'
	@echo 'make soak      20,000 seeds, ten minutes of faults, several hosts, a killed planner, a GPU: hours'
	@echo 'make bench     the benchmarks'

setup:
	@scripts/setup $(PYTHON)

serve: setup
	$(BIN)/dynamo-lite serve $(GRAPH) -f $(CONFIG) $(ARGS)

check: setup
	scripts/check

test: check
	scripts/test $(ARGS)

test-all: check
	scripts/test --all

soak: setup
	scripts/soak

bench: setup
	scripts/bench $(ARGS)
