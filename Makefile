# Start with `make demo` or `make test`. Both create .venv from locks/dev.lock first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ZOO := .venv-zoo/bin
ZOO_READY := .venv-zoo/.ready

.PHONY: help setup demo test test-all test-faults check format test-gpu test-ray test-zoo zoo bench docs readme audit lock

help:
	@echo "make demo      compare AGC and BatchNorm at batch size 1 and write a page (under 3 minutes on 2 CPU cores)"
	@echo "make test      run the fast tests on the CPU (at most 5 minutes on 2 cores)"
	@echo "make test-all  run all tests on the CPU, as CI does (about 15 minutes on 2 cores)"
	@echo "make test-faults  try thousands of faults against folders, images and processes, and print a table (about 20 minutes)"
	@echo "make check     check formatting, lint and types"
	@echo "make format    format the code and fix lint errors"
	@echo "make docs      build the documentation into site/ and check its links"
	@echo "make readme    write the tables and the picture of README.md and docs/ from the committed results"
	@echo "make bench     measure time and memory of AGC and its peers (about 2 minutes on a CPU)"
	@echo "make test-gpu  run the tests that need a CUDA device"
	@echo "make test-ray  run the test that needs Ray (installs Ray into .ray)"
	@echo "make test-zoo  run the tests against timm, MONAI and other libraries (in .venv-zoo)"
	@echo "make zoo       convert, train and fold 111 models of 22 libraries, and write docs/zoo.md (about 15 minutes)"
	@echo "make audit     look up known vulnerabilities of the pinned packages (needs a network)"
	@echo "make setup     create .venv with pinned packages and an editable install"

setup: $(READY)

$(READY): locks/dev.lock locks/torch.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deepcontrol needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python dev/lock.py install locks/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(READY)
	$(BIN)/python -m deepcontrol demo --out out/demo

test: $(READY)
	@echo "Running the fast tests: at most 5 minutes on 2 idle cores. make test-all runs all of them (about 15 minutes)."
	$(BIN)/python -m pytest -n 2 -q -m "not gpu and not slow"

test-all: $(READY)
	@echo "Running all tests: about 15 minutes on 2 idle cores. make test runs the fast ones (at most 5 minutes)."
	$(BIN)/python -m pytest -n 2 -q

test-faults: $(READY)
	$(BIN)/python -m tests.faults.campaign

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Uses the Python that has the CUDA build of torch: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make test-gpu: torch finds no CUDA device")'
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu tests

test-ray: .ray
	PYTHONPATH=.ray $(BIN)/python -m pytest -q tests/workbench/study/test_ray.py

# Ray is large and optional. It goes into a folder of its own, so that .venv stays as pinned.
.ray: $(READY) locks/ray.lock
	rm -rf $@.new
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --target $@.new -r locks/ray.lock
	rm -rf $@ && mv $@.new $@

# The other libraries have an environment of their own.
$(ZOO_READY): locks/zoo.lock locks/torch.lock
	$(PYTHON) -m venv .venv-zoo
	$(ZOO)/python dev/lock.py install locks/zoo.lock
	touch $@

# Deprecation warnings between these libraries are ignored; all other warnings are errors.
test-zoo: $(ZOO_READY)
	PYTHONPATH=src $(ZOO)/python -m pytest -n 2 -q -W ignore::DeprecationWarning -W ignore::FutureWarning tests/zoo

# Continues the committed table. Measure all models again with: make zoo ZOO_OPTIONS=--fresh
zoo: $(ZOO_READY) .zoo-more
	PYTHONPATH=src $(ZOO)/python -m tests.convert.campaign
	PYTHONPATH=src:.zoo-more $(ZOO)/python -m benchmarks.zoo $(ZOO_OPTIONS)

# More libraries for the table, without those that they require for other things than their models. The tests do
# not need them.
.zoo-more: $(ZOO_READY) locks/zoo-more.lock
	rm -rf $@.new
	$(ZOO)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --target $@.new -r locks/zoo-more.lock
	rm -rf $@ && mv $@.new $@

bench: $(READY)
	$(BIN)/python -m deepcontrol bench

# From results/camvid and benchmarks/results. The tests fail if the files are out of date.
readme: $(READY)
	$(BIN)/python results/checksums.py
	$(BIN)/python results/performance.py
	$(BIN)/python results/figure.py
	$(BIN)/python results/readme.py

# The variable silences an advertisement.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

.venv-docs/.ready: locks/docs.lock
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python dev/lock.py install locks/docs.lock
	touch $@

# A report: packages with known vulnerabilities make it fail, a missing database does not.
audit: .venv-audit/.ready
	.venv-audit/bin/pip-audit --disable-pip --require-hashes --progress-spinner off $(foreach lock,$(wildcard locks/*.lock),-r $(lock))

.venv-audit/.ready: locks/audit.lock
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python dev/lock.py install locks/audit.lock
	touch $@

# Pin the installed packages of all environments, with hashes. Takes some minutes, and needs a network.
lock: $(READY) $(ZOO_READY) .venv-docs/.ready .venv-audit/.ready .ray .zoo-more
	$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | $(BIN)/python dev/lock.py write locks/dev.lock
	$(ZOO)/python -m pip freeze --all --exclude pip | $(BIN)/python dev/lock.py write locks/zoo.lock
	.venv-docs/bin/python -m pip freeze --all --exclude pip --exclude setuptools | $(BIN)/python dev/lock.py write locks/docs.lock
	.venv-audit/bin/python -m pip freeze --all --exclude pip --exclude setuptools | $(BIN)/python dev/lock.py write locks/audit.lock
	$(BIN)/python -m pip freeze --path .ray | $(BIN)/python dev/lock.py write locks/ray.lock
	$(BIN)/python -m pip freeze --path .zoo-more | $(BIN)/python dev/lock.py write locks/zoo-more.lock
