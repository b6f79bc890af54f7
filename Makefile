# The two commands: `make demo` trains the digits example on two processes, `make test`
# runs the tests, `make test-more` the rest of them. They install what they need first, the
# environment into .venv (what the wheel is tested in: into .venv-wheel-VERSION; TFX: into
# .venv-tfx), and are quick the second time.

PYTHON ?= python3
# The TensorFlow to develop against. tensorflow-cpu comes without the CUDA libraries, which
# are gigabytes. With a GPU: `make install TENSORFLOW=tensorflow[and-cuda]==2.21.*`.
# keras_hvd builds against 2.16 to 2.21. The newest is the default because its headers
# change most.
TENSORFLOW ?= tensorflow-cpu==2.21.0
KERAS ?= keras==3.15.*
# The extras of pyproject.toml that come with keras_hvd, and versions of other packages.
EXTRAS ?= dev
PINNED ?=
# The versions of all packages that the tests have passed with, for some of Python's and
# TensorFlow's: what is released tomorrow breaks `make newest-tests`, which has none.
CONSTRAINTS ?= $(wildcard $(call CONSTRAINTS_OF,$(lastword $(subst ==, ,$(TENSORFLOW)))))
CONSTRAINTS_OF = tests/constraints/python$(PYTHON_VERSION)-tensorflow$(subst *,0,$(1)).txt
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

VENV := .venv
BIN := $(VENV)/bin
NATIVE := keras_hvd/_native
# The same libraries for `make soak`, with faults.
FAULTS := $(VENV)/faults
SEED ?= $(shell date +%s)
# The machine that `make wheel` and `make native-tests` build for: this one, or, with
# Debian's cross compiler and its emulator, another one.
MACHINE := $(shell uname -m)
ARCHITECTURE ?= $(MACHINE)
OTHER_MACHINE := $(filter-out $(MACHINE),$(ARCHITECTURE))
REQUIREMENTS := $(VENV)/.requirements
INSTALLED := $(VENV)/.installed
# The libraries, for the TensorFlow of this environment.
BUILT := $(NATIVE)/$(VENV).built
CXX_SOURCES = $(shell find tf_ops benchmarks/simulation -name '*.cc' -o -name '*.h') \
	$(wildcard benchmarks/*.c)
NATIVE_SOURCES := $(shell find tf_ops bazel -type f -not -name '*.pyc') \
	WORKSPACE BUILD .bazelrc .bazelignore
BAZEL_OPTIONS = $(OTHER_MACHINE:%=--config=%) \
	--repo_env=PYTHON_BIN_PATH=$(CURDIR)/$(BIN)/python
BAZEL_TEST = bazel test $(BAZEL_OPTIONS)
NATIVE_TESTS := //tf_ops/... //benchmarks/simulation/...

# With it each Python process imports Keras, and ends, in half the time.
export PYTHONPATH := $(CURDIR)/tests/imports$(addprefix :,$(PYTHONPATH))
# Else each process compiles keras_hvd anew where the caller has set it, as container
# images do.
unexport PYTHONDONTWRITEBYTECODE

COMMA := ,
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
# Tests measure time, and ranks use all cores.
ifndef MAY_RUN_AT_ONCE
.NOTPARALLEL:
endif

.PHONY: install demo wheel docs test test-more test-quick lint format clean distclean FORCE
.PHONY: system-packages test-packages native-tests unit-tests one-rank-tests launch-tests
.PHONY: page-tests benchmark-tests four-ranks-tests two-hosts-tests install-tests
.PHONY: launch-hosts-tests parallel-tests hosts-tests core-tests newest-tests wheel-tests
.PHONY: elastic-tests trainings-hosts-tests wheel-all added-collective-tests ray-tests spark-tests
.PHONY: pod-tests
.PHONY: native-objects ends-wheel-tests installed-wheel-tests tfx-tests torch-tests constraints
.PHONY: sanitize soak layouts bench test-gpu bench-gpu bench-gpu-calls lines

install: $(BUILT)

demo: install
	$(BIN)/khvdrun -np 2 $(BIN)/python examples/digits.py

# Three of the first steps run at once, and each prints when it has ended: launched jobs,
# the longest two, wait half of the time, for programs to end or for limits to pass. Not
# the last ones: ranks that wait for each other are twice as slow beside others.
test:
	$(MAKE) $(AT_ONCE) --jobs=2 install native-objects
	$(MAKE) $(AT_ONCE) --jobs=3 lint test-packages native-tests launch-hosts-tests \
		launch-tests elastic-tests install-tests unit-tests
	$(MAKE) --no-print-directory parallel-tests hosts-tests

# The rest, which seldom fails where those passed. Two hosts wait for their slow cables two
# thirds of the time: beside them, wheels are built and installed.
test-more:
	$(MAKE) $(AT_ONCE) --jobs=2 one-rank-tests page-tests benchmark-tests \
		added-collective-tests
	$(MAKE) --no-print-directory four-ranks-tests trainings-hosts-tests
	$(MAKE) $(AT_ONCE) --jobs=2 two-hosts-tests ends-wheel-tests
	$(MAKE) --no-print-directory torch-tests
	$(MAKE) $(AT_ONCE) --jobs=2 ray-tests spark-tests pod-tests

AT_ONCE = --no-print-directory --output-sync=target MAY_RUN_AT_ONCE=yes

# --- set-up -------------------------------------------------------------------------

# $(call unless,CONDITION,PACKAGE): the package, where the condition is empty.
unless = $(if $(strip $(1)),,$(2))
# The distribution's packages that are missing.
MISSING = $(strip \
	$(call unless,$(shell command -v bazel),bazel-bootstrap) \
	$(call unless,$(wildcard /usr/share/bazel/rules/java),bazel-rules-java) \
	$(call unless,$(wildcard /usr/src/googletest/googletest),googletest) \
	$(call unless,$(shell command -v g++),g++) \
	$(call unless,$(shell command -v mpirun),openmpi-bin) \
	$(call unless,$(wildcard /usr/sbin/tc /sbin/tc /usr/bin/tc),iproute2) \
	$(foreach machine,$(OTHER_MACHINE), \
		$(call unless,$(shell command -v $(machine)-linux-gnu-g++),g++-$(machine)-linux-gnu) \
		$(call unless,$(shell command -v qemu-$(machine)),qemu-user)) \
	$(call unless,$(shell $(PYTHON) -c 'import ensurepip; print(1)' 2>&-),python3-venv))

system-packages:
ifneq ($(MISSING),)
ifeq ($(shell id -u),0)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(MISSING)
else
	@echo "Missing: $(MISSING). Install with: sudo apt-get install $(MISSING)" >&2
	@exit 1
endif
endif

# The packages that some tests need. Where one is missing, its tests are skipped.
MISSING_FOR_TESTS = $(strip \
	$(call unless,$(wildcard /usr/bin/chromium),chromium) \
	$(call unless,$(shell command -v curl),curl) \
	$(call unless,$(shell command -v openssl),openssl) \
	$(call unless,$(wildcard /usr/sbin/sshd),openssh-server) \
	$(call unless,$(wildcard /usr/sbin/slurmctld),slurmctld) \
	$(call unless,$(wildcard /usr/sbin/slurmd),slurmd) \
	$(call unless,$(wildcard /usr/bin/srun),slurm-client) \
	$(call unless,$(wildcard /usr/sbin/munged),munge))

# Where its tests look for Debian's MPICH, which is not installed: `mpirun` would then be
# another one for all users of this machine.
DEBIANS_MPICH := $(VENV)/debians-mpich

test-packages: | system-packages
ifeq ($(shell id -u),0)
	$(if $(MISSING_FOR_TESTS),apt-get update -qq)
	$(if $(MISSING_FOR_TESTS),DEBIAN_FRONTEND=noninteractive \
		apt-get install -qq -y --no-install-recommends $(MISSING_FOR_TESTS))
	$(if $(wildcard $(DEBIANS_MPICH)),,$(UNPACK_MPICH))
endif

# Its libraries' names have numbers that are the distribution's.
MPICH_NEEDS = $$(apt-cache depends mpich | grep -oP ' Depends: \K$(1).*')

define UNPACK_MPICH
	apt-get update -qq
	apt-get install -qq -y --no-install-recommends $(call MPICH_NEEDS,libslurm)
	rm -rf $(DEBIANS_MPICH).begun && mkdir -p $(DEBIANS_MPICH).begun/packages
	cd $(DEBIANS_MPICH).begun/packages && \
		apt-get download -qq mpich $(call MPICH_NEEDS,libmpich)
	for package in $(DEBIANS_MPICH).begun/packages/*.deb; do \
		dpkg -x $$package $(DEBIANS_MPICH).begun; \
	done
	rm -r $(DEBIANS_MPICH).begun/packages
	mv $(DEBIANS_MPICH).begun $(DEBIANS_MPICH)
endef

$(BIN)/python: | system-packages
	$(PYTHON) -m venv $(VENV)

# Newer than the installation when other versions are asked for.
$(REQUIREMENTS): ASKED = $(TENSORFLOW) $(KERAS) $(EXTRAS) $(PINNED) $(CONSTRAINTS)
$(REQUIREMENTS): FORCE | $(BIN)/python
	@echo '$(ASKED)' | cmp -s - $@ || echo '$(ASKED)' > $@

PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check \
	$(patsubst %,--constraint %,$(CONSTRAINTS))

$(INSTALLED): pyproject.toml setup.py $(REQUIREMENTS) $(CONSTRAINTS)
	@echo 'Installs into $(VENV), then builds: about 5 minutes on two idle cores, most of them silent'
	$(PIP_INSTALL) '$(TENSORFLOW)' '$(KERAS)' $(PINNED)
	$(PIP_INSTALL) --editable '.[$(EXTRAS)]'
	@touch $@

# An editable installation needs pip once; after a change of the C++, only Bazel.
$(BUILT): $(NATIVE_SOURCES) $(INSTALLED)
	$(BIN)/python -I bazel/build_libraries.py $(NATIVE)
	@touch $@

# The wheel, for one TensorFlow: make wheel TENSORFLOW=tensorflow-cpu==2.19.*, else the one
# that the active environment or .venv has. `make wheel-all`: for all of these. Those that
# are not installed are taken out of their own wheels. For another machine: make wheel
# ARCHITECTURE=aarch64
WHEEL_TENSORFLOWS ?= 2.16.2 2.17.1 2.18.1 2.19.1 2.20.0 2.21.0
DIST ?= dist
BUILD_WHEEL = @$(BIN)/python bazel/build_wheel.py --python $(PYTHON)
wheel: | $(BIN)/python
	$(BUILD_WHEEL) $(if $(filter file,$(origin TENSORFLOW)),--prefer-installed) \
		$(DIST) $(ARCHITECTURE) '$(lastword $(subst ==, ,$(TENSORFLOW)))'

wheel-all: | $(BIN)/python
	$(BUILD_WHEEL) $(DIST) $(ARCHITECTURE) $(WHEEL_TENSORFLOWS)

# The pages of docs/ as a site, in .venv/site. It takes the sources of keras_hvd alone.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --config-file docs/site/mkdocs.yml

# --- tests --------------------------------------------------------------------------

lint: install
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy --no-error-summary
	@$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

# The C++ that does not need TensorFlow, while that is being installed.
native-objects: | $(BIN)/python
	bazel build $(BAZEL_OPTIONS) $(patsubst %/BUILD,//%/..., \
		$(filter-out tf_ops/kernels/%,$(wildcard tf_ops/*/BUILD)))

# The C++ tests. For another machine, in its emulator: make native-tests ARCHITECTURE=aarch64
native-tests: install
	$(BAZEL_TEST) $(NATIVE_TESTS)

# The tests of one process, the examples in the docstrings among them.
unit-tests: install test-packages
	$(BIN)/python -m pytest -q tests/unit $(PAGES:%=--ignore=%)

# The site of docs/ and the pages of reports, in a browser.
PAGES := tests/unit/test_site.py tests/unit/report/test_page.py
page-tests: install test-packages
	$(BIN)/python -m pytest -q $(PAGES)

# The parallel ones on one rank.
one-rank-tests: install
	$(BIN)/khvdrun -np 1 $(BIN)/python -m pytest -q -x tests/parallel

# The tests of installations, and of the first steps that the pages tell users.
ADDED_COLLECTIVE := \
	tests/install/test_contributing.py::test_the_compiler_takes_the_collective
install-tests: install test-packages
	$(BIN)/python -m pytest -q tests/install --deselect $(ADDED_COLLECTIVE)

# The C++ of a collective that is added as CONTRIBUTING.md says.
added-collective-tests: install
	$(BIN)/python -m pytest -q $(ADDED_COLLECTIVE)

# The tests of launching.
launch-tests: install test-packages
	$(BIN)/python -m pytest -q tests/launch \
		$(patsubst %,--ignore=%,$(WITH_HOSTS) $(BENCHMARK_TESTS) $(ELASTIC_TESTS))

# Those of jobs whose ranks go and come.
ELASTIC_TESTS := $(sort $(wildcard $(patsubst %,tests/launch/test_%.py,*elastic* joining \
	newcomers punish)))
elastic-tests: install test-packages
	$(BIN)/python -m pytest -q $(ELASTIC_TESTS)

# The tests of the benchmarks.
BENCHMARK_TESTS := tests/launch/test_benchmarks.py
benchmark-tests: install test-packages
	$(BIN)/python -m pytest -q $(BENCHMARK_TESTS)

# The tests of jobs on several hosts, which wait most of the time, for limits to pass and
# programs to end; and the examples.
WITH_HOSTS := $(patsubst %,tests/launch/test_%.py,examples hosts_option mpi run_on_hosts \
	several_hosts slurm vanished_host)
launch-hosts-tests: install test-packages
	$(BIN)/python -m pytest -q $(WITH_HOSTS)

# The same tests in jobs of two ranks, and of four; tests/parallel/conftest.py says which
# run where.
parallel-tests: install
	$(BIN)/khvdrun -np 2 $(BIN)/python -m pytest -q -x tests/parallel

four-ranks-tests: install
	$(BIN)/khvdrun -np 4 $(BIN)/python -m pytest -q -x tests/parallel

# Those of three ranks on two hosts, and collectives on two hosts of one rank. All hosts
# are this machine; where they can have networks, those are slow ones. Of the second two,
# each link for tensors has several connections. Of whole trainings, two ranks on one host
# have shown nearly all.
TRAININGS := tests/parallel/strategy tests/parallel/keras/test_weights.py
hosts-tests: install
	$(ON_TWO_HOSTS) tests/parallel $(TRAININGS:%=--ignore=%)

trainings-hosts-tests: install
	$(ON_TWO_HOSTS) $(TRAININGS)

ON_TWO_HOSTS = $(BIN)/python tests/on_hosts.py --rate 1gbit 2 1 \
	$(BIN)/python -m pytest -q -x

# The pages' programs are the same there.
two-hosts-tests: install
	KERAS_HVD_DATA_CONNECTIONS=3 \
	$(BIN)/python tests/on_hosts.py --rate 100mbit --delay 0.1 1 1 \
		$(BIN)/python -m pytest -q -x tests/parallel/collectives \
		$(filter-out %/test_guides.py,$(wildcard tests/parallel/test_*.py))

# The tests that depend on TensorFlow's version, on two ranks: all collectives, the
# optimizer, callbacks and data. With another version: make core-tests VENV=.venv-2.18
# TENSORFLOW=tensorflow-cpu==2.18.*
core-tests: install
	$(BIN)/khvdrun --check-build
	$(BIN)/python -m pytest -q tests/unit/test_native.py
	$(CORE_UNITS)
	$(CORE_JOB)

CORE_UNITS = $(BIN)/python -m pytest -q tests/unit/test_optimizer.py tests/unit/data
CORE_JOB = $(call JOB,collectives data keras/test_optimizer.py \
	keras/test_broadcast_global_variables.py keras/test_learning_rate.py)
# The part of them that runs every function of the libraries.
LIBRARIES_JOB = $(call JOB,collectives keras/test_optimizer.py)
JOB = $(BIN)/khvdrun -np 2 $(BIN)/python -m pytest -q -x $(addprefix tests/parallel/,$(1))

# With the versions that PyPI has today.
newest-tests:
	rm -rf .venv-newest
	$(MAKE) --no-print-directory core-tests VENV=.venv-newest EXTRAS=test \
		TENSORFLOW=tensorflow-cpu KERAS=keras

# The wheel: what is in it, and the same tests with each TensorFlow that it serves, in a
# fresh environment where only its own programs are on the PATH, and the checkout's
# package on no path. `make test-more` has the oldest and the newest of them.
wheel-tests: install wheel-all
	$(BIN)/python -m pytest -q tests/wheel --dist $(DIST)
	for version in $(WHEEL_TENSORFLOWS); do \
		tensorflow=tensorflow-cpu==$$version; \
		$(MAKE) --no-print-directory installed-wheel-tests VENV=.venv-wheel-$$version \
			TENSORFLOW=$$tensorflow LINKED=$$([ $$tensorflow != '$(TENSORFLOW)' ] || \
				echo $(VENV)/lib/python$(PYTHON_VERSION)/site-packages); \
	done

# Of the oldest and the newest of them.
ends-wheel-tests: install
	$(MAKE) --no-print-directory wheel-tests DIST=$(VENV)/dist \
		WHEEL_TENSORFLOWS='$(firstword $(WHEEL_TENSORFLOWS)) $(lastword $(WHEEL_TENSORFLOWS))'

# The oldest is also the only one that the last tensorflow-io loads on. Before 2.18 they
# want NumPy 1, which pyarrow refuses from 20 on. LINKED has the packages of the checkout's
# environment where that has this TensorFlow: they are not installed once more, and what
# other tests have shown with them of the same Python files is not shown once more.
installed-wheel-tests: EXTRAS := test$(if $(findstring ==2.16.,$(TENSORFLOW)),$(COMMA)io)
installed-wheel-tests:
	$(PYTHON) -m venv --clear $(VENV)
	$(if $(LINKED),cp -alf $(LINKED)/. $(VENV)/lib/python$(PYTHON_VERSION)/site-packages)
	$(if $(LINKED),$(BIN)/pip uninstall --quiet --yes keras_hvd)
	$(PIP_INSTALL) '$(TENSORFLOW)' '$(KERAS)' $(if $(CONSTRAINTS),,'pyarrow<20') \
		"$$(echo $(DIST)/keras_hvd-*_$(MACHINE).whl)[$(EXTRAS)]"
	export PATH=$(CURDIR)/$(BIN) PYTHONSAFEPATH=1; \
	$(BIN)/khvdrun --check-build; \
	$(BIN)/khvdrun -np 2 $(BIN)/python examples/digits.py; \
	$(if $(LINKED),,$(CORE_UNITS);) \
	$(if $(LINKED),$(LIBRARIES_JOB),$(CORE_JOB))

# Keras on torch, in an environment without TensorFlow. PyPI's torch brings the libraries
# of CUDA, which are gigabytes; that for CPUs is elsewhere, which pip can be told by
# PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS. The tests leave out tests/imports, which hides
# modules that torch looks for. KerasTuner imports six, and does not say so.
TORCH ?= torch==2.13.*
torch-tests: install
	$(MAKE) --no-print-directory .venv-torch/.installed
	bazel build $(BAZEL_OPTIONS) $(STAND_INS)
	$(ON_TORCH) -m pytest -q tests/torch/alone
	$(TWO_ON_TORCH) tests/torch/parallel
	$(TWO_ON_TORCH) tests/parallel
	$(TWO_ON_TORCH) --stand-in-gpu $(ON_A_GPU:%=tests/torch/parallel/test_%.py)

STAND_INS := //tf_ops/testing/gpu:libcuda.so.1 //tf_ops/testing/gpu:libnccl.so.2
ON_A_GPU := on_gpu callbacks collectives during_backward optimizer sync_batch_normalization
ON_TORCH = PYTHONPATH=$(CURDIR) KERAS_BACKEND=torch .venv-torch/bin/python
TWO_ON_TORCH = $(ON_TORCH) -m keras_hvd.launch -np 2 \
	.venv-torch/bin/python -m pytest -q -x

.venv-torch/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps '$(TORCH)'
	$(@D)/bin/pip install --quiet --disable-pip-version-check \
		$(addprefix --constraint ,$(CONSTRAINTS)) \
		torch '$(KERAS)' cloudpickle keras-tuner numpy pytest pytest-timeout pyyaml six
	@touch $@

# Ray and Spark, each beside the packages of the checkout's environment.
ray-tests: install
	$(MAKE) --no-print-directory .venv-ray/.installed
	.venv-ray/bin/python -m pytest -q tests/clusters/test_ray.py

spark-tests: install
	$(if $(shell command -v java),,$(INSTALL_JAVA))
	$(MAKE) --no-print-directory .venv-spark/.installed
	JAVA_TOOL_OPTIONS='$(OF_SHORT_JVMS)' \
		.venv-spark/bin/python -m pytest -q tests/clusters/test_spark*.py

# Its JVMs end before better code would have saved what it takes to compile.
OF_SHORT_JVMS := -XX:TieredStopAtLevel=1 -XX:+UseSerialGC

INSTALL_JAVA = apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	apt-get install -qq -y --no-install-recommends openjdk-17-jre-headless

.venv-ray/.installed: PACKAGES = 'ray[train,tune,data]>=2.60'
# PySpark does not know pandas 3.
.venv-spark/.installed: PACKAGES = 'pyspark[connect]>=4.0' 'pandas<3'
.venv-ray/.installed .venv-spark/.installed: pyproject.toml $(INSTALLED)
	$(PYTHON) -m venv --clear $(@D)
	cp -alf $(VENV)/lib/python$(PYTHON_VERSION)/site-packages/. \
		$(@D)/lib/python$(PYTHON_VERSION)/site-packages
	sed '/^pandas==/d' /dev/null $(CONSTRAINTS) > $(@D)/constraints.txt
	$(@D)/bin/pip install --quiet --disable-pip-version-check \
		--constraint $(@D)/constraints.txt $(PACKAGES)
	@touch $@

# Pods, by podman in a network of its own.
pod-tests: install
	$(if $(shell command -v podman),,$(INSTALL_PODMAN))
	$(BIN)/python -m pytest -q tests/clusters/test_pods.py

INSTALL_PODMAN = apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	apt-get install -qq -y --no-install-recommends podman runc netavark iptables \
		catatonit dnsmasq-base openssh-client

# TFX with all that a pipeline takes, of other versions than elsewhere. Its own
# requirements cannot be met from PyPI: see docs/tfx.md. .venv-tfx is left as it is until
# these files or versions change.
TFX := examples/tfx
tfx-tests:
	$(MAKE) --no-print-directory tfx-environment VENV=.venv-tfx EXTRAS=test CONSTRAINTS= \
		PINNED='-r $(TFX)/requirements.txt'
	.venv-tfx/bin/python -m pytest -q tests/tfx

.PHONY: tfx-environment
tfx-environment: $(VENV)/.tfx

$(VENV)/.tfx: $(BUILT) $(wildcard $(TFX)/*.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check -r $(TFX)/requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
		-r $(TFX)/requirements-no-deps.txt
	@touch $@

# The constraints anew, from the environments that `make test-more` has made: after `make
# distclean test-more CONSTRAINTS=` they have what PyPI has today.
constraints:
	$(call FREEZE,.venv-ray,2.21.0)
	$(call FREEZE,$(VENV)-wheel-2.16.2,2.16.2)

FREEZE = $(1)/bin/pip freeze --exclude-editable --exclude keras_hvd \
	> $(VENV)/constraints.txt && mv $(VENV)/constraints.txt $(call CONSTRAINTS_OF,$(2))

# For the inner loop: what a change most often breaks, in about five minutes.
test-quick: lint
	$(BIN)/python -m pytest -q tests/unit
	$(CORE_JOB)

# The C++ tests under the sanitizers: memory and undefined behaviour, then data races.
sanitize: install
	$(BAZEL_TEST) --config=asan $(NATIVE_TESTS)
	$(BAZEL_TEST) --config=tsan $(NATIVE_TESTS)

# A fuzzer's inputs for the code that reads messages of other hosts. The inputs that showed
# something new are kept in an archive beside each *_fuzz.cc, and read again by `make
# native-tests`. Clang compiles the readers. It refuses the reductions, which g++ compiles.
FUZZERS := coordination/messages transport/hosts_job_state
FUZZ_INPUTS ?= 10000000
FUZZED = $(filter-out %_test.cc %_fuzz.cc,$(wildcard \
	$(patsubst %,tf_ops/%/*.cc,coordination operation transport)))
FUZZ := $(VENV)/fuzz
CORPUS = tf_ops/$*_corpus.tar.gz
# The same inputs give the same archive on any machine. The C++ tests read this format.
SAME_BYTES := --format=ustar --mtime=@0 --mode=644 --owner=0 --group=0 --numeric-owner
.PHONY: fuzz $(FUZZERS:%=fuzz-%)
fuzz: $(FUZZERS:%=fuzz-%)

$(FUZZERS:%=fuzz-%): fuzz-%: install
	$(if $(shell command -v clang++-14),,apt-get install -qq -y --no-install-recommends \
		clang-14 libclang-rt-14-dev)
	bazel build //tf_ops/collectives
	rm -rf $(FUZZ)/$*/kept
	mkdir -p $(FUZZ)/$*/found $(FUZZ)/$*/kept
	$(if $(wildcard $(CORPUS)),tar -xzf $(CORPUS) -C $(FUZZ)/$*/kept)
	clang++-14 -std=c++17 -O1 -g -fsanitize=fuzzer,address,undefined \
		-fno-sanitize-recover=all -I. -o $(FUZZ)/$*/fuzzer tf_ops/$*_fuzz.cc $(FUZZED) \
		"$$(bazel info bazel-bin)"/tf_ops/collectives/_objs/collectives/*.o -pthread -ldl
	$(FUZZ)/$*/fuzzer -runs=$(FUZZ_INPUTS) -max_len=1024 -use_value_profile=1 \
		-malloc_limit_mb=4 -artifact_prefix=$(FUZZ)/$*/ \
		$(FUZZ)/$*/found $(FUZZ)/$*/kept
	$(FUZZ)/$*/fuzzer -merge=1 $(FUZZ)/$*/kept $(FUZZ)/$*/found
	ls $(FUZZ)/$*/kept | tar -cf $(FUZZ)/$*/kept.tar -C $(FUZZ)/$*/kept -T - $(SAME_BYTES)
	gzip -dc $(CORPUS) | cmp -s - $(FUZZ)/$*/kept.tar || \
		gzip -9nc $(FUZZ)/$*/kept.tar > $(CORPUS)

# Kills a random rank of a training at a random moment, fifty times; a thousand random
# steps, fifty kills and some stops with libraries that have faults
# (tf_ops/transport/faults.h), again with SEED=...; how soon a death is known; a thousand
# jobs in one process; more than 2 GiB at once between hosts; then all parallel tests on
# three and four ranks, also those that other targets run on other numbers only; and `make
# layouts`.
soak: install
	$(BIN)/python -m pytest -q --schedules 100000 tests/unit/test_membership.py
	$(BIN)/python -I bazel/build_libraries.py $(FAULTS) faults
	$(BIN)/python -m pytest -q --kills 50 \
		--seed $(SEED) --faults $(CURDIR)/$(FAULTS) \
		tests/launch/test_faults.py tests/launch/test_kill_time.py \
		tests/launch/test_failure.py tests/launch/test_rejoin.py \
		tests/launch/test_elastic_bits.py tests/launch/test_elastic_points.py \
		tests/launch/test_mpi.py::test_more_than_2_gib_travel_at_once
	for ranks in 3 4; do \
		$(BIN)/khvdrun -np $$ranks $(BIN)/python -m pytest -q -x --all-tests \
			tests/parallel; \
	done
	$(MAKE) --no-print-directory layouts

# Collectives and Keras' optimizer between more hosts, slower ones, and farther ones:
# the ranks of each host, a cable's rate, its delay in ms, and whether they use TLS.
LAYOUTS := 2+2:1gbit:0:1 2+2:100mbit:2:0 1+1+1+1:1gbit:0.1:1 1+1+1+1:100mbit:0:0 \
	2+2+2+2:1gbit:0:0

layouts: install
	for layout in $(LAYOUTS); do \
		IFS=: read -r counts rate delay tls <<<"$$layout"; \
		echo "$$counts ranks, $$rate, $$delay ms, TLS: $$tls"; \
		KERAS_HVD_TLS=$$tls $(BIN)/python tests/on_hosts.py --rate $$rate \
			--delay $$delay $${counts//+/ } $(BIN)/python -m pytest -q -x \
			--all-tests tests/parallel/collectives tests/parallel/test_*.py; \
	done

# On a machine with a GPU: the C API on it, by NCCL and through host memory, several ranks
# on one and one on each; and TensorFlow, where it is there and sees the GPU. Everything
# else is skipped, with the reason. Without .venv it takes $(PYTHON), which needs NumPy and
# pytest alone, and without Bazel a compiler makes the engine; nothing is installed.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_ENGINE = $(if $(shell command -v bazel),$(NATIVE),$(VENV)/engine)/libkeras_hvd.so

test-gpu: gpu-engine
	$(GPU_PYTHON) -m pytest -c /dev/null --rootdir=$(CURDIR) --import-mode=importlib \
		-q -rs --random-seed $(SEED) --engine $(CURDIR)/$(GPU_ENGINE) tests/gpu

.PHONY: gpu-engine
gpu-engine: $(if $(shell command -v bazel),install,$(VENV)/engine/libkeras_hvd.so)

# As Bazel does it (bazel/cc.bzl, tf_ops/BUILD): the engine needs nothing but the system.
NOT_IN_ENGINE = _test _fuzz $(addprefix _,$(filter-out $(MACHINE),x86_64 aarch64))
ENGINE_SOURCES = $(filter-out $(addprefix %,$(NOT_IN_ENGINE:=.cc)),$(wildcard \
	$(patsubst %,tf_ops/%/*.cc,transport collectives cuda nccl operation coordination timeline \
	backend gpu engine)))
$(VENV)/engine/libkeras_hvd.so: $(ENGINE_SOURCES) $(wildcard tf_ops/*/*.h)
	rm -rf $(@D)
	mkdir -p $(@D)
	printf '%s\n' $(ENGINE_SOURCES) | xargs -P "$$(nproc)" -I {} sh -c \
		'$(CXX) -std=c++17 -O3 -fPIC -fvisibility=hidden -ffp-contract=off -DNDEBUG \
			-I. -c {} -o $(@D)/$$(echo {} | tr / .).o'
	$(CXX) -shared -o $@ $(@D)/*.o -pthread -ldl -Wl,-soname,libkeras_hvd.so \
		-Wl,--version-script,tf_ops/exports.lds -Wl,-z,defs

# --- measurements -------------------------------------------------------------------

BENCHMARKS := bench-allreduce bench-gradients bench-scaling bench-hosts
.PHONY: $(BENCHMARKS)

# Tables, and JSON and plots in benchmarks/results. The machine should be idle.
bench: $(BENCHMARKS)

$(BENCHMARKS): bench-%: install
	$(BIN)/python benchmarks/$*.py

# The coordination of jobs of up to 16,384 ranks, simulated, and of small ones for real.
.PHONY: bench-simulate
bench-simulate: install
	$(BIN)/python benchmarks/simulate.py --compare

# Allreduces on GPUs beside bare NCCL; where there is no GPU it says so.
bench-gpu: gpu-engine
	$(GPU_PYTHON) benchmarks/gpu_allreduce.py --engine $(CURDIR)/$(GPU_ENGINE)

# The engine's own time for tensors on GPUs, where there is none.
bench-gpu-calls: gpu-engine
	$(GPU_PYTHON) benchmarks/gpu_calls.py --engine $(CURDIR)/$(GPU_ENGINE)

# --- upkeep -------------------------------------------------------------------------

# The lines of each folder, as wc counts them: of the code that users run, of its tests,
# and of the rest.
lines:
	@$(call COUNT_LINES,Python,keras_hvd/*.py)
	@$(call COUNT_LINES,C++,tf_ops/*.cc tf_ops/*.h $(CXX_TESTS:%=:!%))
	@$(call COUNT_LINES,Tests in Python,tests/*.py)
	@$(call COUNT_LINES,Tests in C++,$(CXX_TESTS))
	@$(call COUNT_LINES,Neither,bazel tf_ops/*BUILD WORKSPACE Makefile setup.py \
		benchmarks/*.py benchmarks/*.c benchmarks/*.cc benchmarks/*.h benchmarks/*BUILD \
		examples/*.py docs/*.py)

CXX_TESTS := tf_ops/*_test.cc tf_ops/*_fuzz.cc tf_ops/*testing.h tf_ops/testing/*.cc \
	tf_ops/testing/*.h

# $(call COUNT_LINES,TITLE,FILES): files as Git's patterns, where a * matches a / too.
COUNT_LINES = echo '$(1)'; git ls-files -z -- $(patsubst %,'%',$(2)) | xargs -0 wc -l | \
	awk '$$2 != "total" { \
		deep = split($$2, path, "/"); \
		lines[path[1] (deep > 2 ? "/" path[2] : "")] += $$1; all += $$1 \
	} END { \
		for (folder in lines) printf "%8d  %s\n", lines[folder], folder | "sort -k2"; \
		close("sort -k2"); printf "%8d\n", all \
	}'

format: install
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .
	@$(BIN)/clang-format -i $(CXX_SOURCES)

clean:
	-bazel clean --expunge
	rm -rf $(NATIVE) keras_hvd.egg-info .pytest_cache .ruff_cache .mypy_cache benchmarks/results
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-* benchmarks/.environments
