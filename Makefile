# CI calls the same verbs. Everything happens in a virtual environment of its own.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
# Where pip may find a CPU build of torch, if its usual index has none: an index URL.
TORCH_INDEX ?=
# The CPU build is the same library without gigabytes of CUDA packages. Empty: the usual one.
TORCH_BUILD ?= +cpu
# Any other version than the pinned one is for 'make compat'.
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
COMPAT ?= 2.11.0 2.15.0
# torchtitan needs older packages than the other frameworks.
TITAN ?= .venv-torchtitan
PIP = $(BIN)/python -m pip --disable-pip-version-check
INSTALL = $(PIP) install --quiet --constraint $(VENV)/constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: install compiled frameworks torchtitan demo example test thorough gpu-test compat lint docs screenshots dist deb proof fuzz audit bench bench-peers clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >$(VENV)/constraints.txt
	$(INSTALL) "torch==$(TORCH)$(TORCH_BUILD)" 2>/dev/null || $(INSTALL) torch
	@# Up to 0.1.0 the distribution was called tmd: its entry points would be there twice.
	$(PIP) uninstall --quiet --yes tmd
	$(INSTALL) --editable ".[trainer,embedded,kubernetes,test,lint]"
	@touch $@

# What only the documentation needs, and the check of its types.
$(VENV)/.docs-installed: $(VENV)/.installed
	$(INSTALL) --editable ".[docs]"
	@touch $@

# The frameworks of tmd.integrations, and what scripts use beside them: a loader of torchdata, and
# low-rank adapters. Without them their tests skip.
frameworks: install
	$(INSTALL) --editable ".[accelerate,lightning,transformers,trl]" torchdata peft

torchtitan: $(TITAN)/.installed

# torchtitan imports triton, which a CPU build of torch does not bring.
$(TITAN)/.installed: VENV := $(TITAN)
$(TITAN)/.installed: pyproject.toml constraints.txt constraints-torchtitan.txt
	$(PYTHON) -m venv $(TITAN)
	awk -F== 'NR == FNR { own[$$1] } NR == FNR || !($$1 in own)' \
		constraints-torchtitan.txt constraints.txt >$(TITAN)/constraints.txt
	$(INSTALL) "torch==$(TORCH)+cpu" 2>/dev/null || $(INSTALL) torch
	$(PIP) uninstall --quiet --yes tmd
	$(INSTALL) --editable ".[torchtitan,embedded]" triton
	@touch $@

demo: install
	$(BIN)/tmd demo $(ARGS)

# A script of the folder 'examples' through the demo's story: drained, killed, compared.
EXTRA = $(filter accelerate lightning transformers trl,$(NAME))
example: $(if $(filter torchtitan,$(NAME)),torchtitan,install)
	$(if $(EXTRA),$(INSTALL) --editable ".[$(EXTRA)]")
	$(if $(filter torchtitan,$(NAME)),$(TITAN)/bin,$(BIN))/tmd demo --script examples/$(or $(NAME),nanogpt)/train.py $(ARGS)

# Where Python may not write bytecode, as in many containers, each of thousands of processes would
# compile tmd again.
compiled: install
	$(BIN)/python -m compileall -q tmd detectors policies

# Two files at a time: a fault test mostly waits, for processes that start and leases that lapse.
# In the order of the folders: long files last would leave one of the two without work.
test: compiled
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		-m "not thorough" --durations 20 $(ARGS)

# Variants of fault tests for which 'make test' has no time.
thorough: compiled
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m thorough $(ARGS)

# Needs a GPU: the tests of NCCL and of copies of a device's tensors.
gpu-test:
	$(MAKE) install VENV=$(VENV)-gpu TORCH_BUILD=
	$(VENV)-gpu/bin/python -m pytest -m gpu tests $(ARGS)

# The tests on the lowest torch that pyproject.toml allows and on the newest one, each in an
# environment of its own: .venv-torch-VERSION.
compat:
	for version in $(COMPAT); do \
		$(MAKE) test VENV=$(VENV)-torch-$$version TORCH=$$version || exit 1; \
	done

lint: install $(VENV)/.docs-installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) docs

# The documentation, into site/. A link that leads nowhere is an error, unless --quiet hides it.
docs: install $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The pictures of the page in the documentation, by Debian's chromium.
screenshots: install $(VENV)/.docs-installed
	$(BIN)/python -m tests.daemon.screenshots docs/pictures

# The wheel and the source distribution, into dist/. Needs no network.
dist: install
	@# Images and packages are built from the one wheel that is there.
	rm -f dist/*.whl dist/*.tar.gz
	$(BIN)/python -m build --no-isolation --outdir dist .

# A Debian package of the daemon with all that it depends on, into dist/.
deb: dist
	PATH=$(abspath $(BIN)):$$PATH packaging/deb/build \
		dist/tmd_trainmover-$(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' tmd/__init__.py)-py3-none-any.whl \
		dist --constraint constraints.txt

# The state machines of the control plane for a long time: hundreds of thousands of events.
proof: install
	TMD_PROOF_SCALE=$(or $(SCALE),60) $(BIN)/python -m pytest --numprocesses 2 --timeout 7200 \
		tests/core/test_plane.py tests/core/test_simulation.py $(ARGS)

# A million spoilt messages at every door.
fuzz: install
	TMD_FUZZ_ROUNDS=$(or $(ROUNDS),1000000) TMD_FUZZ_SEED=$(or $(SEED),1) \
		$(BIN)/python -m pytest --numprocesses 2 --timeout 7200 tests/fuzz $(ARGS)

# Known holes in what is pinned. Asks the index's advisories, so it needs the network; whatever it
# cannot ask about is an error.
audit:
	$(PYTHON) -m venv $(VENV)-audit
	$(VENV)-audit/bin/python -m pip --disable-pip-version-check install --quiet pip-audit
	for pins in constraints.txt constraints-torchtitan.txt; do \
		$(VENV)-audit/bin/pip-audit --strict --no-deps --disable-pip --requirement $$pins || exit 1; \
	done

bench: install
	$(BIN)/python -m bench.collectives
	$(BIN)/python -m bench.downtime
	$(BIN)/python -m bench.pause
	$(BIN)/python -m bench.steady
	$(BIN)/python -m bench.passing
	$(BIN)/python -m bench.snapshots
	$(BIN)/python -m bench.layouts
	$(BIN)/python -m bench.growth
	$(BIN)/python -m bench.daemon
	$(BIN)/python -m bench.goodput
	$(BIN)/python -m bench.decisions
	$(BIN)/python -m bench.fleet
	$(MAKE) frameworks
	$(BIN)/python -m bench.frameworks

bench-peers: install
	$(BIN)/python -m bench.peers

clean:
	rm -rf $(VENV) $(VENV)-audit $(VENV)-torch-* $(VENV)-gpu $(TITAN) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
