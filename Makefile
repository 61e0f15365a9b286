# The two commands of this project: `make demo` and `make test`. `make help` lists the others.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON := .venv/bin/python
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
MODEL := target/models/SmolLM2-135M-Instruct.Q4_1.gguf
TIMED := scripts/timed.sh
CARGO := cargo
# Tests that need the real target, or an OpenAI client, find them here.
export DA_TEST_GGUF := $(CURDIR)/$(MODEL)
export DA_TEST_PYTHON := $(CURDIR)/$(PYTHON)

.PHONY: help
help: ## Lists the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

.PHONY: demo
demo: venv model build ## Runs the whole loop on a real model and ends with target/demo/report.html
	@$(PYTHON) scripts/demo/run.py --binaries $(TARGET_DIR)/debug $(DEMO)

.PHONY: test
test: venv model fmt clippy doc unit python deploy $(if $(SKIP_VLLM),,vllm) ## Everything that CI checks; SKIP_VLLM=1 leaves out the real vLLM

.PHONY: venv
venv: # The pinned OpenAI client and the schema checks, in .venv
	@$(TIMED) venv scripts/setup_venv.sh

.PHONY: model
model: venv ## Fetches the demo's target, SmolLM2-135M-Instruct (98 MB)
	@$(TIMED) model scripts/fetch_target.sh

.PHONY: build
build: ## Builds da-build, da-serve and da-sidecar
	@$(TIMED) build $(CARGO) build --locked --bins

.PHONY: fmt
fmt: ## Checks the formatting
	@$(TIMED) fmt $(CARGO) fmt --check

.PHONY: clippy
clippy: ## Lints; checks the dependencies once, which `doc` reuses
	@$(TIMED) clippy $(CARGO) clippy --locked --all-targets -- -D warnings

.PHONY: doc
doc: ## Builds the documentation of this crate
	@RUSTDOCFLAGS="-D warnings" $(TIMED) doc $(CARGO) doc --locked --no-deps --document-private-items

.PHONY: unit
unit: venv model ## Runs the Rust tests
	@if $(CARGO) nextest --version >/dev/null 2>&1; then \
	    $(TIMED) tests $(CARGO) nextest run --locked --all-targets; \
	    $(TIMED) doctests $(CARGO) test --locked --doc; \
	else \
	    $(TIMED) tests $(CARGO) test --locked; \
	fi

.PHONY: python
python: venv ## Tests the demo against stand-ins of the programs
	@$(TIMED) python $(PYTHON) -m unittest discover -s scripts/demo/tests

.PHONY: deploy
deploy: venv ## Checks deploy/ and dashboards/
	@$(TIMED) deploy scripts/check_deploy.sh

.PHONY: vllm
vllm: build ## Compares drafts of every family with a real vLLM on this CPU (6 GB of packages, 3 minutes)
	@$(TIMED) vllm-setup scripts/vllm/setup.sh
	@$(TIMED) greedy $(CARGO) build --locked --example greedy
	@$(TIMED) vllm .venv-vllm/bin/python scripts/vllm/check.py --binaries $(TARGET_DIR)/debug

.PHONY: bench-build
bench-build: model build ## Measures da-build's drafts and speed into target/bench/build.json; needs `make vllm`'s packages
	@$(TIMED) build $(CARGO) build --locked --example build_bench --example train_speed
	$(PYTHON) benches/build.py $(BENCH)

.PHONY: bench-train
bench-train: ## Trains DRAFT beside PyTorch in turns; needs `make vllm`'s packages
	@$(TIMED) build $(CARGO) build --locked --example train_speed
	.venv-vllm/bin/python benches/train.py $(DRAFT)

.PHONY: bench
bench: model build ## Measures decoding speed of the demo's target on this machine
	@$(TIMED) bench $(CARGO) run --locked --example decode_speed -- $(MODEL)

.PHONY: clean-demo
clean-demo: ## Removes what the demo made
	rm -rf target/demo
