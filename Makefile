# Each target does the set-up that it needs, and is quick the second time.

PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/disagg.yaml
GRAPH ?= graphs.disagg:Frontend
ARGS ?=

.PHONY: help setup serve test check bench

help:
	@echo 'make setup   virtual environment, dependencies, tiny model'
	@echo 'make serve   start $(GRAPH) with $(CONFIG) (ARGS="--Frontend.port=8080")'
	@echo 'make test    all checks and tests'
	@echo 'make check   lint, format and types only'
	@echo 'make bench   the benchmarks'

setup:
	@scripts/setup $(PYTHON)

serve: setup
	$(BIN)/dynamo-lite serve $(GRAPH) -f $(CONFIG) $(ARGS)

check: setup
	scripts/check

test: check
	scripts/test $(ARGS)

bench: setup
	scripts/bench $(ARGS)
