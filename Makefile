# plait's targets. Each does one thing; CI calls the same ones. PIP_ARGS reaches pip (another index, a proxy, ...).
PYTHON ?= python3
PIP_ARGS ?=
CONFIG ?=
ARGS ?=
BIN := .venv/bin
# Some containers set it. Every process that a test or a server starts would compile hundreds of our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-kernels setup-nixl serve test test-slow test-avx2 demo check bench starter clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   .venv with everything in it (says first what it downloads)"
	@echo "make setup-kernels  Triton, too (190 MB): with it 'make test' runs the GPU kernels in an interpreter"
	@echo "make setup-nixl  NIXL, too (69 MB; 240 MB on disk): one-sided transfers between hosts, nixl://"
	@echo "make serve   set up, then the server on 127.0.0.1:8000   [CONFIG=plait.yaml]"
	@echo "make demo    set up, start, make images into out/demo, stop"
	@echo "make test    set up, then the test suite                 [ARGS='-k lora']"
	@echo "make test-slow  the tests that 'make test' leaves out"
	@echo "make test-avx2  the equality of images once more, as a processor without AVX-512 computes them"
	@echo "make check   ruff, mypy strict, import-linter, vulture"
	@echo "make bench   the side-by-side benchmarks                 [ARGS='images --quick']"
	@echo "make starter train the starter models again (npm, hours)"

.venv/.ready: pyproject.toml constraints.txt deploy/setup_env.py
	$(PYTHON) deploy/setup_env.py --python $(PYTHON) --pip-args="$(PIP_ARGS)"

setup: .venv/.ready

setup-kernels: setup
	$(BIN)/python -c "import triton" 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e ".[dev,kernels]"

setup-nixl: setup
	$(BIN)/python -c "import nixl_cu12" 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e ".[dev,nixl]"

serve: setup
	$(BIN)/plait serve $(CONFIG)

demo: setup
	$(BIN)/plait demo --out out/demo

test: setup
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --again --durations=20 \
	  -m "not slow" $(ARGS)

# pytest ends with 5 where no test is slow.
test-slow: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 --again --durations=20 \
	  -m slow $(ARGS) || [ $$? -eq 5 ]

test-avx2: setup
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest -n 2 --dist loadfile \
	  --max-worker-restart=0 --again --durations=20 $(ARGS) tests/integration/test_*_equality.py

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/unreached.py

bench: setup
	$(BIN)/plait bench $(or $(ARGS),images)

starter: setup
	$(BIN)/python -m starter_training $(ARGS)

clean:
	rm -rf .venv out build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
