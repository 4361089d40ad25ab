# make train   set up and run the quickstart (2 CPU cores, about 5 minutes)
# make test    set up and run ruff, mypy and the tests, real Docker, namespaces and SGLang included
# make help    the rest
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
APT    := env DEBIAN_FRONTEND=noninteractive apt-get
RUN    ?= quickstart
comma  := ,

.PHONY: help train test test-full check docs bench clean
help:
	@echo "make train      set up, then train the quickstart policy (RUN=name for another run folder)"
	@echo "make test       set up, then everything CI runs"
	@echo "make test-full  soaks, and every environment, level, attack and backend; JSON into docs/evidence/"
	@echo "make check      ruff and mypy alone"
	@echo "make docs       build the documentation site into build/site; a dead link is an error"
	@echo "make bench      the benchmarks, into docs/evidence/"
	@echo "make clean      remove the virtual environment and caches (runs/ stays)"

# One virtual environment, made again only when what it holds changes. uv is several times as fast as pip; it does not
# read pip's settings, so it is told where else to look, and where it fails pip does it. Modules are compiled when they
# are first imported, since most never are; that needs Python's caches, which some machines switch off.
export PYTHONDONTWRITEBYTECODE :=
export PIP_NO_COMPILE := 1
ifndef UV_FIND_LINKS
export UV_FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
endif
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
UV      := $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt
install  = $(UV) $(1) || $(PIP) $(1)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "agentrl needs Python 3.11 or later: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module; on Debian: apt-get install python3-venv"; exit 1; }

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	-$(PIP) uv
	$(call install,-e .)
	@touch $@

$(VENV)/.train: $(VENV)/.base
	$(call install,-e '.[train]')
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(call install,-e '.[train$(comma)docker$(comma)sglang$(comma)ray$(comma)view$(comma)docs$(comma)dev]')
	$(call install,--no-deps verl)
	@touch $@ $(VENV)/.train

# What must come from the system: PROGRAM=PACKAGES. As root on Debian it is installed, else we say what is missing.
define need
	@missing=; for pair in $(1); do test -x $${pair%%=*} || missing="$$missing $${pair#*=}"; done; \
	missing=$$(echo $$missing | tr , ' '); test -z "$$missing" || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then $(APT) update -qq && $(APT) install -y -qq $$missing >/dev/null; \
	else echo "ask an administrator for: apt-get install $$missing"; exit 1; fi
endef

.PHONY: system-build system-test
system-build:
	$(call need,/usr/bin/git=git /usr/bin/cc=build-essential$(comma)python3-dev)
system-test: system-build
	$(call need,/usr/sbin/dockerd=docker.io /usr/sbin/debootstrap=debootstrap /usr/sbin/ip=iproute2 /usr/bin/chromium=chromium)

train: $(VENV)/.train
	@if [ -e runs/$(RUN)/recipe.yaml ]; then resume=--resume; fi; \
	$(BIN)/agentrl train recipes/quickstart.yaml --set run.name=$(RUN) $$resume

# An environment of its own, installed beside the other one.
.PHONY: sglang
sglang: $(VENV)/.base
	$(BIN)/agentrl engine install sglang --cpu

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

# First all installations side by side, then two branches of tests, about equally long: what needs SGLang has its server
# for itself; what needs Ray has one cluster for all of its tests.
test: system-build
	@$(MAKE) --no-print-directory -j3 --output-sync=line system-test $(VENV)/.test sglang
	@$(MAKE) --no-print-directory -j2 --output-sync=line test-others test-engines

.PHONY: test-others test-engines
test-others:
	$(BIN)/python -m pytest -q tests/sandboxes
	$(BIN)/python -m pytest -q -n 2 --dist loadfile $(addprefix --ignore tests/,sandboxes cluster engines learn)

test-engines: check
	$(BIN)/python -m pytest -q tests/engines
	$(BIN)/python -m pytest -q tests/cluster -o faulthandler_timeout=960 -o faulthandler_exit_on_timeout=true
	$(BIN)/python -m pytest -q tests/learn

test-full: system-test check sglang
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
