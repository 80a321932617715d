# Everything runs in .venv, which is made from the hashed constraints at first use.
PYTHON ?= python3
BIN := .venv/bin
# The folder of uv, if this Makefile installed it.
export PATH := $(PATH):$(CURDIR)/.venv/uv/bin
READY := .venv/.ready
# Without bytecode, importing torch takes 11 s instead of 5 s.
unexport PYTHONDONTWRITEBYTECODE
# Tests write thousands of small files. A file system in memory creates them ten times as fast.
SCRATCH := $(shell free=$$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1); \
  if [ $${free:-0} -gt 4000000 ]; then echo /dev/shm; else echo $${TMPDIR:-/tmp}; fi)
# Each file of tests runs in one process, so that its fixtures are made once, in the order of
# fixtures.py. Each process computes with one thread, because two that use all cores slow each other.
PYTEST := TMPDIR=$(SCRATCH) OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: quickstart test quick-tests test-all all-tests test-device mutants gpu-report coverage lint check-evidence wheel-check constraints audit clean

quickstart: $(READY)
	$(BIN)/ssl-bench quickstart

test: lint quick-tests

quick-tests: $(READY)
	$(PYTEST) -m "not slow and not gpu and not browser" --durations=8

test-all: lint all-tests test-device

all-tests: $(READY)
	SSL_BENCH_CHECK_SHAPES=1 $(PYTEST) --durations=8

# Run the tests that need a GPU on a simulated one. It patches torch, so it has its own processes.
test-device: $(READY)
	$(PYTEST) -p tests.support.simulated_cuda.plugin -m gpu --durations=8 \
	  $$(grep -rl --include='test_*.py' 'mark\.gpu' tests)

# Plant mutants in copies of the code, about 40 minutes on one core. JOBS=N plants N at a time.
mutants: $(READY)
	$(BIN)/python -m tests.mutants --jobs $(or $(JOBS),1)

# Measure the suite on a GPU in nine minutes and write results/devices. `make gpu-report
# ONLY=training` measures only this section.
gpu-report: $(READY)
	$(BIN)/python -m tests.benchmarks.gpu_report $(if $(ONLY),--only '$(ONLY)')

# Tests with coverage take 1.4 times as long, so no other target measures it.
coverage: $(READY)
	mkdir -p build
	SSL_BENCH_CHECK_SHAPES=1 $(PYTEST) -m "not gpu and not browser" --cov --cov-report=term-missing:skip-covered

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

# Use uv if it is installed, otherwise install it with pip beside the environment.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "expected Python >= 3.11, got %d.%d; run make PYTHON=python3.12" % sys.version_info[:2])'
	@command -v uv >/dev/null || { $(PYTHON) -m venv .venv/uv && .venv/uv/bin/pip install -q uv; }
	@test -x $(BIN)/python || uv venv -q --allow-existing --python $(PYTHON) .venv; \
	  echo "installing the environment into .venv"; \
	  uv pip install -q -p $(BIN)/python --require-hashes -r constraints.txt && \
	  uv pip install -q -p $(BIN)/python --no-deps -e .
	@touch $(READY)

# Generate pages and figures again from the committed records and compare them.
check-evidence: $(READY)
	$(BIN)/python -m tests.benchmarks.generated

# Install only the wheel, in its own environment, and run quickstart in another folder.
wheel-check: $(READY)
	rm -rf dist/check && mkdir -p dist/check/elsewhere
	$(BIN)/python -m build -q --wheel --outdir dist/check
	uv venv -q dist/check/venv --python $(BIN)/python
	uv pip install -q -p dist/check/venv --require-hashes -r constraints.txt
	uv pip install -q -p dist/check/venv --no-deps dist/check/*.whl
	cd dist/check/elsewhere && ../venv/bin/ssl-bench quickstart

constraints:
	uv pip compile -q --universal --python-version 3.11 --all-extras --generate-hashes --upgrade \
	  --no-header --no-annotate --no-emit-index-url pyproject.toml -o constraints.txt

# List known vulnerabilities of the installed packages. This needs the network.
audit:
	uv tool run pip-audit --require-hashes --disable-pip -r constraints.txt

clean:
	rm -rf .venv dist build
