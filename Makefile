# Everything runs in .venv, made from the hashed constraints at first use.
PYTHON ?= python3
BIN := .venv/bin
# Where uv is, if it was not at hand.
export PATH := $(PATH):$(CURDIR)/.venv/uv/bin
READY := .venv/.ready
# A file to a process, so that what its tests share is made once; in the order of fixtures.py. Each
# computes with one thread: two that take all cores wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: quickstart test quick-tests test-all all-tests test-device mutants gpu-report coverage lint check-evidence wheel-check constraints audit clean

quickstart: $(READY)
	$(BIN)/ssl-bench quickstart

test: lint quick-tests

quick-tests: $(READY)
	$(PYTEST) -m "not slow and not gpu and not browser" --durations=8

test-all: lint all-tests test-device

all-tests: $(READY)
	SSL_BENCH_CHECK_SHAPES=1 $(PYTEST) --durations=8

# What needs a GPU, on one that exists in Python alone; patches torch, so in processes of its own.
test-device: $(READY)
	$(PYTEST) -p tests.support.simulated_cuda.plugin -m gpu --durations=8 \
	  $$(grep -rl --include='test_*.py' 'mark\.gpu' tests)

# 20 minutes on one core; touches no file of the checkout. JOBS=N plants N faults at a time.
mutants: $(READY)
	$(BIN)/python -m tests.mutants --jobs $(or $(JOBS),1)

# On a machine with a GPU, in nine minutes: what it makes of this suite, as results/devices.
gpu-report: $(READY)
	$(BIN)/python -m tests.benchmarks.gpu_report

# Its tracer makes the tests 1.4 times as long, so that no other target asks for it.
coverage: $(READY)
	mkdir -p build
	SSL_BENCH_CHECK_SHAPES=1 $(PYTEST) -m "not slow and not gpu and not browser" --cov --cov-report=term-missing:skip-covered

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

# uv where it is at hand, else installed with pip beside the environment. Bytecode once and not by
# every process: where PYTHONDONTWRITEBYTECODE is set torch and its kind take 11 s to import, not 5.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "expected Python >= 3.11, got %d.%d; say make PYTHON=python3.12" % sys.version_info[:2])'
	@command -v uv >/dev/null || { $(PYTHON) -m venv .venv/uv && .venv/uv/bin/pip install -q uv; }
	@test -x $(BIN)/python || uv venv -q --allow-existing --python $(PYTHON) .venv; \
	  echo "installing the environment into .venv"; \
	  uv pip install -q -p $(BIN)/python --compile-bytecode --require-hashes -r constraints.txt && \
	  uv pip install -q -p $(BIN)/python --no-deps -e .
	@touch $(READY)

# Pages and pictures that are made, made again from the committed records and compared.
check-evidence: $(READY)
	$(BIN)/python -m tests.benchmarks.generated

# The wheel alone, in an environment of its own, from another folder.
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

# Known vulnerabilities of what is installed; asks the public advisories, which needs the network.
audit:
	uv tool run pip-audit --require-hashes --disable-pip -r constraints.txt

clean:
	rm -rf .venv dist build
