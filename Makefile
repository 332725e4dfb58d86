# Needs only Python 3.10 to 3.14 and make. Another interpreter: `PYTHON=python3.12 make test`.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

IN_VENV = "$(VENV)/bin/python"
PIP_INSTALL = $(IN_VENV) -m pip install -qq --disable-pip-version-check
PYTEST = $(IN_VENV) -m pytest

# LiteLLM would otherwise try to fetch its price map at import.
export LITELLM_LOCAL_MODEL_COST_MAP := True

.PHONY: help demo test lint types check format ray extras notebooks full clean FORCE

help:
	@echo "make demo    the optimizer at work on a simulated LM: no key, no network"
	@echo "make test    the tests, slow ones left out (ARGS='-k shuffle' goes to pytest)"
	@echo "make check   format, lint, types and tests"
	@echo "make ray     the tests of rollouts on Ray, which it installs"
	@echo "make extras  the tests of MLflow and W&B, both local, and of the notebooks, which it runs"
	@echo "make full    everything slow: all tests and the benchmarks"
	@echo "make notebooks  run the notebooks and keep their outputs (ARGS=04_playbook: that one)"
	@echo "make format  put the code into the format that 'make check' wants"
	@echo "make clean   remove environments, caches and build products"

demo: $(VENV)/core
	@$(IN_VENV) -m dspy_combee demo $(ARGS)

test: $(VENV)/dev
	@$(PYTEST) -m "not slow" -n 2 --dist loadfile $(ARGS)

extras: $(VENV)/extras
	@REQUIRE_EXTRAS=1 $(PYTEST) tests/test_tracking.py tests/test_notebooks.py $(ARGS)

notebooks: $(VENV)/extras
	@$(IN_VENV) notebooks/run.py $(ARGS)

lint: $(VENV)/dev
	@$(IN_VENV) -m ruff format --check .
	@$(IN_VENV) -m ruff check .

types: $(VENV)/dev
	@$(IN_VENV) -m mypy

check: lint types test

format: $(VENV)/dev
	@$(IN_VENV) -m ruff check --fix .
	@$(IN_VENV) -m ruff format .

ray: $(VENV)/ray
	@$(PYTEST) tests/test_ray.py tests/test_executors.py -k ray $(ARGS)

# Where there is a Chromium the tests of the report's page may not be skipped; elsewhere they are.
has_chromium = for name in chromium chromium-browser google-chrome chrome; do \
	command -v $$name > /dev/null && { echo 1; break; }; done

full: lint types $(VENV)/ray $(VENV)/extras
	@REQUIRE_EXTRAS=1 REQUIRE_BROWSER=$$($(has_chromium)) $(PYTEST) $(ARGS)
	@for script in benchmarks/[a-z]*.py; do \
		name=$$(basename "$$script" .py); \
		echo "== benchmarks.$$name"; $(IN_VENV) -m "benchmarks.$$name" || exit 1; \
	done

clean:
	rm -rf .venv* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One line, through $(error), so that nothing else is on the screen.
supported = $(shell "$(PYTHON)" -c 'import sys; print((3, 10) <= sys.version_info[:2] < (3, 15))' 2>/dev/null)
has_venv = $(shell "$(PYTHON)" -c 'import ensurepip, venv; print(True)' 2>/dev/null)
define require_python
$(if $(filter True,$(supported)),,$(error Python 3.10 to 3.14 is needed and "$(PYTHON)" is not that: \
	install it, or name it, as in `PYTHON=python3.12 make $(MAKECMDGOALS)`))
$(if $(filter True,$(has_venv)),,$(error "$(PYTHON)" has no venv or no ensurepip: install python3-venv, \
	as in `apt install python3-venv`, or name another Python, as in `PYTHON=python3.12 make $(MAKECMDGOALS)`))
endef

# The file `core` holds what the environment was made from. When that changes (interpreter, place or
# pyproject.toml) the environment is made anew; `dev`, being older or gone, follows.
made_from = "$(PYTHON)" -c 'import sys; print(sys.version, sys.base_prefix)'; pwd; cat pyproject.toml

$(VENV)/core: FORCE
	$(require_python)
	@made_from="$$($(made_from))"; \
	[ "$$made_from" = "$$(cat "$@" 2>/dev/null)" ] || { \
		echo "Making $(VENV) ..." && \
		"$(PYTHON)" -m venv --clear "$(VENV)" && \
		$(PIP_INSTALL) --editable . && \
		printf '%s\n' "$$made_from" > "$@"; \
	}

$(VENV)/dev: $(VENV)/core
	@echo "Adding what tests need to $(VENV) ..."
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch "$@"

$(VENV)/ray: $(VENV)/dev
	@echo "Adding Ray to $(VENV) ..."
	@$(PIP_INSTALL) --editable '.[dev,ray]'
	@touch "$@"

$(VENV)/extras: $(VENV)/dev
	@echo "Adding MLflow, W&B and Jupyter to $(VENV) ..."
	@$(PIP_INSTALL) --editable '.[mlflow,notebooks,wandb]'
	@touch "$@"
