# All do their set-up themselves, in .venv; they need Python 3.12 or newer and nothing else.
# Another Python: make test PYTHON=/path/to/python3.12
#
#   make quickstart   what jflash does: two minutes with its set-up
#   make test         lint, types, and of the tests what finds a defect soonest: minutes
#   make test-rest    of the tests that `make test` leaves out all mechanisms, and more examples of each property
#   make test-all     both, and then every test in the deep profile, which searches for hours

PYTHON := python3
VENV_PYTHON := .venv/bin/python

# An activated environment of another project takes no part.
ifdef VIRTUAL_ENV
export PATH := $(subst $(VIRTUAL_ENV)/bin:,,$(PATH))
endif
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH
# Many tests start processes of their own, each of which would compile all of JAX's modules again: a second and a half.
unexport PYTHONDONTWRITEBYTECODE

# Each worker begins at its own end of the list, so that modules stay together, and idle ones take from others.
PYTEST := JFLASH_METAL_EMULATOR=1 $(VENV_PYTHON) -m pytest -n auto --dist worksteal

# What XLA compiled is kept for the next run: what takes it longest, and what was used last, up to 1 GiB.
test test-rest: export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.venv/compiled
test test-rest: export JAX_COMPILATION_CACHE_MAX_SIZE := 1073741824
test test-rest: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0.1

.PHONY: quickstart test test-rest test-all

quickstart: .venv/installed-examples
	$(VENV_PYTHON) examples/quickstart.py

# Types are checked beside the tests, and what is found is shown after them.
test: .venv/installed-test
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check
	@echo '$(VENV_PYTHON) -m pyright, beside the tests'; \
	$(VENV_PYTHON) -m pyright --pythonpath $(VENV_PYTHON) >.venv/types.txt 2>&1 & types=$$!; \
	$(PYTEST) -m "not slow"; tests=$$?; \
	wait $$types; types=$$?; cat .venv/types.txt; \
	test $$tests -eq 0 -a $$types -eq 0

test-rest: .venv/installed-test
	$(PYTEST) -m "(slow or hypothesis) and not deep"

test-all: test test-rest
	JFLASH_TEST_PROFILE=deep $(PYTEST) -o faulthandler_timeout=14400

# The tests run the Metal backend in its emulator, which has to be compiled: by the machine's C++ compiler, or by zig.
.venv/installed-test: export JFLASH_METAL_EMULATOR := 1
.venv/installed-test: csrc/CMakeLists.txt $(wildcard csrc/*.cc csrc/*.h csrc/*.mm csrc/emulator/*.* csrc/emulator/include/*)
ifeq ($(shell command -v $(CXX)),)
.venv/installed-test: .venv/zig
export CXX = $(CURDIR)/$(shell echo .venv/lib/python*/site-packages/ziglang/zig) c++
endif

.venv/zig:
	$(PYTHON) -m venv .venv
	$(VENV_PYTHON) -m pip install --quiet 'ziglang>=0.15'
	@touch $@

# The project with one of its extras; made again when pyproject.toml changes. Modules are compiled when first imported.
.venv/installed-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 12) or sys.exit("Python 3.12 or newer is needed; this is " + sys.version)'
	$(PYTHON) -m venv .venv
	$(VENV_PYTHON) -m pip install --quiet --no-compile --editable '.[$*]'
	@touch $@
