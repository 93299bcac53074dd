# Every target sets itself up: the first one makes .venv, from pinned versions, with the Python that
# .ci/find-python prefers unless PYTHON names another.
PYTHON ?= $(shell .ci/find-python)
CONSTRAINTS := .ci/constraints.txt
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup demo test lint types wheel-check check bench differential

setup: $(STAMP)

# torch comes first and by its exact version, so that nothing else decides which one is taken.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "make: no python3 here; install Python 3.11 or later" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "make: $(PYTHON) is older than Python 3.11; set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "make: $(PYTHON) has no venv module; on Debian: apt-get install python3-venv" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -q -c $(CONSTRAINTS) torch==2.13.0
	$(BIN)/pip install --disable-pip-version-check -q -c $(CONSTRAINTS) -e '.[dev,grpc]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/digits/demo.py

test: $(STAMP)
	$(BIN)/python -m tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy -p shmserve
	$(BIN)/mypy tests bench
	$(BIN)/mypy examples/*.py examples/digits examples/table_backend .ci
	$(BIN)/mypy examples/text_classifier

wheel-check: $(STAMP)
	$(BIN)/python .ci/wheel_check.py

check: lint types test wheel-check demo

# Beside a real Triton where there is one; bench/README.md says how to get it.
bench: $(STAMP)
	$(BIN)/python -m bench

# The same arrivals to shmserve and to a real Triton, where bench/peer_setup.sh has put one.
differential: $(STAMP)
	$(BIN)/python -m tests.differential
