# Verbs only; `make` alone lists them. MODEL, PORT, HF_TOKEN and every other variable of docs/operations.md pass through
# the environment or the command line: make serve PORT=9000 MODEL=/path/to/model
PYTHON ?= python3
# auto takes the GPU when a driver is here: make serve RUNTIME=cpu
RUNTIME ?= auto
Q ?= What is the capital of France?

BIN := $(CURDIR)/.venv/bin
export PATH := $(BIN):$(PATH)
INSTALL = $(PYTHON) setup/install.py --runtime $(RUNTIME)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

# Shell scripts and Dockerfiles that git knows, or would add: ignored files are not linted.
SCRIPTS = $(shell git ls-files -co --exclude-standard '*.sh' .ci/run)
DOCKERFILES = $(shell git ls-files -co --exclude-standard 'docker/Dockerfile.*')

.PHONY: help
help: ## list the verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | while IFS=$$'\t' read -r verb text; do \
		printf '  make %-14s %s\n' "$$verb" "$$text"; done

.PHONY: setup setup-dev
setup: ## install vLLM and nibble into .venv (RUNTIME=auto|cpu|cuda)
	@$(INSTALL)
setup-dev: ## setup, and what lint and tests need
	@$(INSTALL) --dev

.PHONY: serve chat plan doctor
serve: setup ## serve MODEL (default: SmolLM2-135M-Instruct) on 127.0.0.1:8000
	@exec ./entrypoint.sh serve
chat: setup ## ask the running server a question: make chat Q="…"
	@nibble chat $(call quote,$(Q))
plan: setup ## show every setting `make serve` would use, and why
	@nibble plan
doctor: setup ## check this machine
	@nibble doctor

.PHONY: lint fmt ruff types shell dockerfiles generated style
lint: setup-dev ## run ruff, pyright, shellcheck, shfmt, hadolint, style, generated docs, recipes
	@$(MAKE) -k -j2 -Otarget types ruff shell dockerfiles generated style
ruff:
	ruff check --quiet .
	lint-imports > /dev/null || lint-imports
	ruff format --check --quiet .
types:
	pyright
shell:
	shellcheck -x $(SCRIPTS)
	shfmt -d -i 2 -ci $(SCRIPTS)
dockerfiles:
	$(if $(DOCKERFILES),hadolint $(DOCKERFILES))
generated:
	nibble docs --check
	python docs/architecture.py --check
	nibble recipes lint
style: ## check the language of docs, comments and messages
	@$(PYTHON) scripts/check_style.py
	@$(PYTHON) scripts/check_style.py --python $(shell git ls-files 'nibble/*.py' 'kernels/*.py' 'tests/*.py')
fmt: setup-dev ## format Python and shell, rewrite generated docs
	ruff check --fix-only --quiet .
	ruff format .
	shfmt -w -i 2 -ci $(SCRIPTS)
	nibble docs
	python docs/architecture.py

# For two cores: unit tests wait half of their time. Two processes at most start servers (tests/support/turns.py).
PROCESSES = --numprocesses 3

.PHONY: test test-all test-system
test: lint ## lint, types, and the tests that fit into 15 minutes on two cores
	pytest $(PROCESSES)
test-all: lint ## every test: the slow ones, and those that `make test` runs when their folder changed
	pytest $(PROCESSES) --slow
test-system: setup-dev ## services, engines, guests, registries and memory pressure, for real (as root; 40 minutes on two cores)
	pytest --system tests/system

.PHONY: patches-newest demo lock clean
patches-newest: setup ## run every probe on the newest release of vLLM and print the tables
	@scripts/patches-newest.sh
demo: setup ## train the embedded demo models again, quantize them, and record their answers
	python models/train_demo.py
	python models/train_demo_moe.py
	python models/quantize_demo.py
	python models/record_canary.py
lock: ## make requirements/*.lock again (UPGRADE=--upgrade: newest versions)
	PYTHON=$(PYTHON) requirements/lock.sh $(UPGRADE)
clean: ## remove .venv and caches
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

quote = '$(subst ','\'',$(1))'
