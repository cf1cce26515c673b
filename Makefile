# make test      install what the suite needs into $(VENV), run it
# make lint      ruff and mypy
# make docs      build the documentation site into build/site; a link that leads nowhere is an error
# make nightly   the property tests with thousands of examples
# make train     train a small model with two processes, then with one, and compare: BACKEND=torch|mindspore
#                DATA=path STEPS=n, more options of hyper-parallel compare in ARGS=
# make bench     measure beside other libraries, in an environment of its own; BACKEND=, options in ARGS=--quick
#
# VENV may name an environment that is ready: one that this file did not make is used as it is, nothing is
# installed into it (make test VENV=~/venvs/dev).

VENV    ?= .venv
BACKEND ?= torch
DATA    ?=
STEPS   ?=
ARGS    ?=
# The interpreter that makes $(VENV), by default the first of these that is new enough.
PYTHON  ?=

PY     := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps

# What an installation is made of.
PARTS := pyproject.toml setup.py constraints.txt $(wildcard hyper_parallel/platform/native/*.[ch])

# constraints.txt keeps an open requirement on torch from fetching a build with gigabytes of CUDA libraries.
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: test lint docs nightly train bench measure clean

ifeq ($(wildcard $(STAMPS))$(wildcard $(PY)),$(PY))
# $(VENV) was made by somebody else.
needs =
else
needs = $(STAMPS)/$(1)
endif

test: $(call needs,test)
	$(PY) -m pytest $(ARGS)

nightly: $(call needs,test)
	HYPOTHESIS_PROFILE=nightly $(PY) -m pytest -m hypothesis --timeout=7200 $(ARGS)

lint: $(call needs,lint)
	$(PY) -m ruff check .
	$(PY) -m mypy

docs: $(call needs,docs)
	$(PY) -m mkdocs build --strict

train: $(call needs,train-$(BACKEND))
	$(PY) -m hyper_parallel.cli compare --backend $(BACKEND) $(if $(DATA),--data $(DATA)) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

bench:
	@$(MAKE) --no-print-directory measure VENV=$(if $(filter .venv,$(VENV)),.venv-bench,$(VENV))

measure: $(call needs,bench-$(BACKEND))
	$(PY) -m benchmarks --backend $(BACKEND) $(ARGS)

clean:
	rm -rf $(if $(wildcard $(STAMPS)),$(VENV)) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info

$(STAMPS)/venv:
	@mkdir -p $(STAMPS)
	@for python in $(or $(PYTHON),python3 python3.12 python3.11 python3.10); do \
		if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then \
			echo "making $(VENV) with $$python"; $$python -m venv $(VENV) && touch $@; exit; \
		fi; \
	done; echo "no Python from 3.10 to 3.12 with venv found; name one: make PYTHON=/path/to/python" >&2; exit 1

$(STAMPS)/test: $(STAMPS)/venv $(PARTS)
	$(INSTALL) -e '.[torch,mindspore,train,test]'
	@touch $@

# mypy reads the types of torch and tyro, so that it finds the same wherever it runs.
$(STAMPS)/lint: $(STAMPS)/venv $(PARTS)
	$(INSTALL) -e '.[torch,train,test,lint]'
	@touch $@

# The site is made from sources alone: no framework.
$(STAMPS)/docs: $(STAMPS)/venv $(PARTS)
	$(INSTALL) -e '.[docs]'
	@touch $@

$(STAMPS)/bench-torch: $(STAMPS)/venv $(PARTS)
	$(INSTALL) -e '.[torch,bench,bench-torch]'
	@touch $@

$(STAMPS)/bench-mindspore: $(STAMPS)/venv $(PARTS)
	$(INSTALL) -e '.[mindspore,bench]'
	@touch $@

$(STAMPS)/train-%: $(STAMPS)/venv $(PARTS)
	$(INSTALL) -e '.[$*,train,text,watch]'
	@touch $@
