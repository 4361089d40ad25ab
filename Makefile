# make train   set up and run the quickstart (2 CPU cores, about 5 minutes)
# make test    set up and run ruff, mypy and the tests, real Docker, namespaces and SGLang included
# make help    the rest
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
APT    := env DEBIAN_FRONTEND=noninteractive apt-get
RUN    ?= quickstart

.PHONY: help train test test-full check docs bench clean
help:
	@echo "make train      set up, then train the quickstart policy (RUN=name for another run folder)"
	@echo "make test       set up, then everything CI runs"
	@echo "make test-full  soaks, and every environment, level, attack and backend; JSON into docs/evidence/"
	@echo "make check      ruff and mypy alone"
	@echo "make docs       build the documentation site into build/site; a dead link is an error"
	@echo "make bench      the benchmarks, into docs/evidence/"
	@echo "make clean      remove the virtual environment and caches (runs/ stays)"

# One virtual environment, made again only when what it holds changes.
$(VENV)/.train: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "agentrl needs Python 3.11 or later: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "no venv module; on Debian: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.test: $(VENV)/.train
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,docker,sglang,ray,view,docs,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt verl
	@touch $@

# What must come from the system. As root on Debian it is installed; otherwise we say what is missing.
define need
	@test -x $(1) || { if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	  then $(APT) update -qq && $(APT) install -y -qq $(2) >/dev/null; \
	  else echo "missing: $(1); ask an administrator for: apt-get install $(2)"; exit 1; fi; }
endef

.PHONY: system-train system-test
system-train:
	$(call need,/usr/bin/python3,python3)
system-test: system-train
	$(call need,/usr/sbin/dockerd,docker.io)
	$(call need,/usr/sbin/debootstrap,debootstrap)
	$(call need,/usr/bin/git,git)
	$(call need,/usr/sbin/ip,iproute2)
	$(call need,/usr/bin/cc,build-essential python3-dev)
	$(call need,/usr/bin/chromium,chromium)

train: system-train $(VENV)/.train
	@if [ -e runs/$(RUN)/recipe.yaml ]; then resume=--resume; fi; \
	$(BIN)/agentrl train recipes/quickstart.yaml --set run.name=$(RUN) $$resume

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# Two branches side by side, about equally long: what needs SGLang waits for it to be installed, and has its server for
# itself; what needs Ray has one cluster for all of its tests.
test: system-test $(VENV)/.test
	@$(MAKE) --no-print-directory -j2 --output-sync=line test-others test-engines

.PHONY: test-others test-engines
test-others:
	$(BIN)/python -m pytest -q tests/sandboxes
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --ignore tests/sandboxes --ignore tests/cluster --ignore tests/engines

test-engines: check
	$(BIN)/agentrl engine install sglang --cpu
	$(BIN)/python -m pytest -q tests/engines
	$(BIN)/python -m pytest -q tests/cluster

test-full: system-test check
	$(BIN)/agentrl engine install sglang --cpu
	failed=0; \
	AGENTRL_FULL=1 $(BIN)/python -m pytest -q --timeout 7200 --report-json=docs/evidence/test-full.json || failed=1; \
	$(BIN)/python -m benchmarks.census --out docs/evidence/tasks.json || failed=1; \
	$(BIN)/python -m benchmarks.matrix --out docs/evidence/matrix.json || failed=1; \
	exit $$failed

docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: system-test $(VENV)/.test
	$(BIN)/python -m benchmarks --out docs/evidence

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
