# lengthen: `make` alone says what there is.
#
#   PYTHON   the Python that .venv is made with:    make setup PYTHON=python3.12
#   ARGS     options for demo, test and bench:      make bench ARGS="--quick"
#
# pip takes its own settings from its environment: PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS choose another build of torch.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check  # -qq: errors alone
TORCH := $(shell grep '^torch==' constraints.txt)
PYTHON_FITS := import sys; v = sys.version_info[:2]; sys.exit(not (3, 11) <= v <= (3, 13))

.PHONY: help setup test slow lint format demo bench docs dist clean
.DEFAULT_GOAL := help

help: ## say what there is
	@echo "usage: make <target>"
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## (.*)$$/\1|\2/' | awk -F'|' '{ printf "  %-8s %s\n", $$1, $$2 }'

setup: $(STAMP) ## make .venv with the package and what its tests need, at the versions of constraints.txt

# torch comes first and alone: an open range would let pip choose another version, or another build, of it.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
		echo "make: there is no '$(PYTHON)' here; name a Python 3.11, 3.12 or 3.13: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c '$(PYTHON_FITS)' || { \
		echo "make: lengthen needs Python 3.11 to 3.13, and '$(PYTHON)' is `$(PYTHON) --version 2>&1`; name another: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH)"
	@$(PIP) install $(TORCH)
	@echo "installing lengthen and its development tools"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

lint: setup ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples benchmarks

test: lint ## lint, then every test that is not slow
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n auto $(ARGS)  # several processes share the cores: do not spin

slow: setup ## the tests that `make test` skips, as they take more than ten seconds each
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n auto --slow -m slow $(ARGS)

format: setup ## let ruff sort imports and lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup ## train six methods short, test them long, and show it: a few minutes; writes demo/report.html
	$(BIN)/lengthen demo $(ARGS)

bench: setup ## attention on this CPU beside its peers, in several minutes; writes benchmarks/results
	$(BIN)/python benchmarks/attention_cpu.py $(ARGS)

$(VENV)/.documented: $(STAMP)
	@echo "installing what builds the site and the packages"
	@$(PIP) install --constraint constraints.txt --editable '.[docs,release]'
	@touch $@

docs: $(VENV)/.documented ## the site, with warnings as errors; writes site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

dist: $(VENV)/.documented ## the wheel and the sdist, checked; writes dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
