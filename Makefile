# `make demo` and `make test` are the two commands: each makes .venv if it is missing, installs, and goes.
PYTHON  ?= python3
# pages that run side by side, one thread each; and files of tests, which often wait for other programs
WORKERS ?= 2
TESTERS ?= 3

BIN    := .venv/bin
READY  := .venv/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Libraries are compiled when they are first imported: most of what pip installs never is.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test check test-pages test-python test-slow lab notebooks masthead export readme site test-site
.NOTPARALLEL:

help:           ## this list
	@echo 'make TARGET [PYTHON=python3.12] [WORKERS=2] [TESTERS=3]'
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' Makefile

demo: $(READY)  ## train the toy English-German translator, translate, score, draw what it looked at
	$(BIN)/annotated-transformer demo

test: check test-pages test-python  ## everything: the pages in step, every page run, then pytest

check: $(READY)  ## export, clean, badges and README change nothing; no page holds what it may not
	@echo '== pages, modules and README in step'
	$(BIN)/python tools/pages.py check

test-pages: $(READY)  ## run every page as a test
	@echo '== every page, from top to bottom'
	OMP_NUM_THREADS=1 $(BIN)/nbdev_test --n_workers $(WORKERS) --timing

test-python: $(READY)  ## pytest, for what a page cannot show
	@echo '== pytest'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -ra -n $(TESTERS) --dist loadfile --no-loadscope-reorder tests

test-slow: $(READY)  ## what `make test` leaves out because it takes long
	OMP_NUM_THREADS=1 $(BIN)/nbdev_test --flags slow --file_re '^63_' --n_workers $(WORKERS) --timing
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -ra -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m slow tests

lab: $(READY)  ## read and edit the pages in JupyterLab
	$(BIN)/jupyter lab nbs

notebooks: masthead export  ## execute every page in place, keep its outputs, write the README
	$(BIN)/python tools/pages.py run
	$(BIN)/python tools/pages.py readme

masthead: $(READY)  ## write the address of settings.ini into every page
	$(BIN)/python tools/pages.py masthead

export: $(READY)  ## the modules from the pages
	$(BIN)/python tools/pages.py export

readme: $(READY)  ## execute the front page and write README.md from it
	$(BIN)/python tools/pages.py masthead index
	$(BIN)/python tools/pages.py run index
	$(BIN)/python tools/pages.py readme

# The site has an environment of its own, since its pages are not executed: no PyTorch, but Sphinx, and packages from npm.
SITE := site/build

site: $(SITE)/.installed  ## build the website from the stored pages into site/build/html (needs Node.js)
	$(SITE)/venv/bin/python site/build.py

test-site: $(READY) site  ## build the website; test it, the live explainer and the attention pages in a browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -ra -n $(WORKERS) -m 'site or not site' tests/test_site.py tests/test_live_explainer.py tests/test_explorer.py

$(SITE)/.installed: site/requirements.txt site/package.json site/package-lock.json
	@echo '== installing into $(SITE)'
	@command -v npm >/dev/null || { echo 'the site needs Node.js with npm: formulas are drawn and fonts are fetched with it' >&2; exit 1; }
	test -x $(SITE)/venv/bin/python || $(PYTHON) -m venv $(SITE)/venv
	$(SITE)/venv/bin/python -m pip install -q -r site/requirements.txt
	cp site/package.json site/package-lock.json $(SITE)/
	npm ci --prefix $(SITE) --silent --no-audit --no-fund
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(READY): settings.ini setup.py pyproject.toml constraints.txt | $(BIN)/python
	@echo '== installing into .venv: a few minutes, and only when the requirements have changed'
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[dev]'
	@touch $@
