# What there is to do here: make help
#
# Needs make and Python 3.11 or newer with venv (on Debian and Ubuntu the package python3-venv).
# Everything else goes into $(VENV); a second run finds it there.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
# The first of these that is new enough makes the environment.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
# For pip when it installs torch: where the default build (with CUDA, 3 GB) is not wanted, the
# option that leads to the index with the CPU build.
TORCH_FROM ?=
# Test processes; on two cores the third works while others wait for disks and servers.
JOBS ?= 3
# What pytest runs, and how: make test TESTS="tests/unit -k refs"
TESTS ?= tests
# Where the demo keeps its store: a path, or a URL such as s3://bucket/demo. URL= says the same.
STORE ?= $(or $(URL),demo-store)

# The tests start hundreds of processes: each would compile the package for itself, or import
# another tree's.
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH

# -qq: pip's warnings about build backends say nothing to who only wants to run this.
PIP = $(BIN)/python -m pip install -qq --retries 10 -c constraints-dev.txt
# Microsoft's emulator of Azure Blob Storage, a program for Node.js, which comes as a wheel.
AZURITE := 3.37.0
AZURITE_STAMP := $(VENV)/azurite/.$(AZURITE)
# mkdocs and its theme have an environment of their own: the tests need them only as a program.
SITE_STAMP := $(VENV)/site/.made
# DeepSpeed changes how other libraries run where it is installed: it has an environment of its own,
# over the packages of $(VENV).
DEEPSPEED_STAMP := $(VENV)/deepspeed/.made
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
NPM_QUIET := --silent --no-audit --no-fund --no-update-notifier --ignore-scripts --fetch-retries 5
TIMED = @began=$$(date +%s); $(1); echo "== $@: $$(($$(date +%s) - began)) s"

.PHONY: help demo azurite test short-tier types layers test-all test-lab soak planted coverage lint format bench docs site clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# --- the environment ----------------------------------------------------------------------------

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=..." >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=25.1'
	@touch $@

# torch comes first and alone: it is most of the bytes, and nothing else decides its version.
$(VENV)/.run: $(VENV)/.made pyproject.toml constraints-dev.txt
	@echo "installing PyTorch into $(VENV) (most of what there is to fetch)"
	@$(PIP) $(TORCH_FROM) torch
	@echo "installing ckptstore"
	@$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what development needs"
	@$(PIP) --group dev
	@touch $@

$(VENV)/.bench: $(VENV)/.run
	@echo "installing what the benchmarks need"
	@$(PIP) --group bench
	@$(PIP) --group bench-native || echo "no C compiler? going on without ZipNN" >&2
	@touch $@

$(AZURITE_STAMP): $(VENV)/.dev
	@echo "installing azurite, which the tests start"
	@PATH="$(abspath $(BIN)):$$PATH" npm install $(NPM_QUIET) --prefix $(VENV)/azurite azurite@$(AZURITE)
	@touch $@

$(SITE_STAMP): $(VENV)/.made pyproject.toml constraints-dev.txt
	@echo "installing what builds the site"
	@$(BIN)/python -m venv $(VENV)/site
	@$(VENV)/site/bin/python -m pip install -qq -c constraints-dev.txt --upgrade 'pip>=25.1'
	@$(VENV)/site/bin/python -m pip install -qq -c constraints-dev.txt --group site
	@touch $@

$(DEEPSPEED_STAMP): $(VENV)/.dev
	@echo "installing DeepSpeed, which a test trains with"
	@$(BIN)/python -m venv --clear --without-pip $(VENV)/deepspeed
	@$(BIN)/python $(PURELIB) > "$$($(VENV)/deepspeed/bin/python $(PURELIB))/below.pth"
	@{ $(BIN)/python -m pip --python $(VENV)/deepspeed/bin/python install -qq --retries 10 \
	-c constraints-dev.txt --no-build-isolation --group deepspeed && touch $@; } \
	|| echo "no C++ compiler? going on without the test that trains with DeepSpeed" >&2

# --- what to do with it -------------------------------------------------------------------------

demo: $(VENV)/.run ## train, save, kill -9, resume bit for bit (STORE=path or URL); 1-3 minutes
	@if [ "$(STORE)" = demo-store ]; then rm -rf demo-store; fi
	@$(BIN)/python docs/demo/demo.py "$(STORE)"

azurite: $(AZURITE_STAMP) ## install the emulator of Azure that the tests start

# The checks run beside the tests, and their output comes after that of the tests if one failed.
test: $(VENV)/.dev $(AZURITE_STAMP) ## checks, and the short tier of the tests; no root, no network
	$(call TIMED,log=$$(mktemp); trap 'rm -f "$$log"' EXIT; failed=0; \
	$(MAKE) --no-print-directory lint > "$$log" 2>&1 & checks=$$!; \
	$(MAKE) --no-print-directory short-tier || failed=1; \
	if wait $$checks; then tail -n 1 "$$log"; else failed=1; cat "$$log"; fi; \
	[ $$failed = 0 ] || exit 1)

short-tier:
	@$(BIN)/python -m pytest -n $(JOBS) -m "not lab and not soak" --short --second-run $(TESTS)

test-all: lint $(AZURITE_STAMP) $(SITE_STAMP) $(DEEPSPEED_STAMP) ## checks, and all tests that need neither root nor network
	$(call TIMED,$(BIN)/python -m pytest -n $(JOBS) -m "not lab and not soak" --durations=10 $(TESTS))

test-lab: $(VENV)/.dev $(SITE_STAMP) ## tests on real storage systems; root on Debian 12, half an hour
	@$(PIP) --group lab
	@PYTHON=$(abspath $(BIN))/python tests/lab/run.sh

# In pieces: CKPTSTORE_SOAK_ROUNDS (of each campaign), CKPTSTORE_SOAK_SEED, CKPTSTORE_MACHINE_STEPS.
soak: $(AZURITE_STAMP) ## the long form of the campaigns: kills, faults, power cuts
	$(call TIMED,$(BIN)/python -m pytest -m soak -o faulthandler_timeout=1800 -o timeout=7200 --durations=10 $(TESTS))

planted: $(AZURITE_STAMP) ## plant bugs that lose data, one at a time, and show which test notices each; a quarter of an hour
	@$(BIN)/python tests/planted/plant.py

coverage: $(AZURITE_STAMP) $(SITE_STAMP) ## tests, and which lines and branches they miss
	@$(BIN)/python -m pytest -n $(JOBS) -m "not lab and not soak" --cov --cov-report=term:skip-covered $(TESTS)

lint: $(VENV)/.dev ## style, types and layers
	$(call TIMED,$(MAKE) --no-print-directory -j2 -k types layers)

types:
	@$(BIN)/mypy

layers:
	@$(BIN)/ruff check; $(BIN)/ruff format --check; $(BIN)/lint-imports --no-cache

format: $(VENV)/.dev ## rewrite the sources in the house style, and the pages made from them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/python docs/reference/generate.py

bench: $(VENV)/.bench ## compare with other tools; several minutes on an idle machine
	$(BIN)/python -m benchmarks.run

docs: $(AZURITE_STAMP) $(SITE_STAMP) ## run every block of the documentation, follow its links, build the site
	@$(BIN)/python -m pytest tests/docs

site: $(SITE_STAMP) ## build the documentation's site, which needs no network: build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(VENV)/site/bin/python -m mkdocs build --strict --quiet
	@echo "open $(abspath build/site/index.html)"

clean: ## remove the environment, caches, builds and the demo's store
	rm -rf $(VENV) build dist demo-store *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
