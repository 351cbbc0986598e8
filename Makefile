# Everything a newcomer needs: `make test` and `make demo`. Both set up .venv first, from requirements.lock.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ZOO := .venv-zoo/bin
ZOO_READY := .venv-zoo/.ready

.PHONY: help setup demo test check format test-gpu test-ray test-zoo zoo bench docs readme lock lock-zoo

help:
	@echo "make demo      the paper's main claims in small, on the CPU: verdicts and a page (under 5 minutes on 2 cores)"
	@echo "make test      the tests, on the CPU"
	@echo "make check     formatting, lint, types"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make test-ray  the test that needs Ray, which it installs into .ray"
	@echo "make test-zoo  the tests against other libraries (timm, MONAI, ...), in an environment of their own"
	@echo "make zoo       the table over their models: converted, trained a step, folded (about 5 minutes on 2 cores)"
	@echo "make bench     time and memory beside BatchNorm's, to a table, a CSV and a chart (on a CPU about 2 minutes)"
	@echo "make docs      the documentation, to site/index.html; links are checked"
	@echo "make readme    the verdicts of results/camvid, into README.md"
	@echo "make setup     the environment alone: .venv, pinned packages, editable install"

setup: $(READY)

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deepcontrol needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(READY)
	$(BIN)/python -m deepcontrol reproduce --preset quick --out out/quick

test: $(READY)
	$(BIN)/python -m pytest -n 2 -q

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Runs in the interpreter that has the CUDA build of torch: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make test-gpu: torch sees no CUDA device here")'
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu tests

test-ray: .ray
	PYTHONPATH=.ray $(BIN)/python -m pytest -q tests/workbench/study/test_ray.py

# Ray is an extra, and large: it comes into a folder beside the environment, which stays as it was.
.ray: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $@.new -c requirements.lock ray
	rm -rf $@ && mv $@.new $@

# Other libraries and their own requirements stay out of .venv. torch is pinned exactly in
# the lock; any other specifier would let pip choose a CUDA build.
$(ZOO_READY): requirements-zoo.lock
	$(PYTHON) -m venv .venv-zoo
	$(ZOO)/python -m pip install --quiet --disable-pip-version-check -r requirements-zoo.lock
	touch $@

# What the libraries say about each other's age is not ours to mend; all other warnings are errors.
test-zoo: $(ZOO_READY)
	PYTHONPATH=src $(ZOO)/python -m pytest -n 2 -q -W ignore::DeprecationWarning -W ignore::FutureWarning tests/zoo

zoo: $(ZOO_READY)
	PYTHONPATH=src $(ZOO)/python -m benchmarks.zoo

bench: $(READY)
	$(BIN)/python -m deepcontrol bench

# Figure 1 and the verdicts of the committed study.
readme: $(READY)
	$(BIN)/python results/readme.py

# An environment of its own: who uses the library needs none of this. The variable silences an advertisement.
docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

.venv-docs/.ready: requirements-docs.lock
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	touch $@

# Pins what is installed now. torch is pinned without its local version, so that any build of it serves.
lock:
	$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/^\(torch==[^+]*\).*/\1/' > requirements.lock

lock-zoo:
	$(ZOO)/python -m pip freeze --all --exclude pip | sed 's/^\(torch==[^+]*\).*/\1/' > requirements-zoo.lock
