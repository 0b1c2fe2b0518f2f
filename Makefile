# FlashAttention and gradient checkpointing: predicted, measured, published.
#
#   make figures                  environment, measurements this machine can make, every figure
#   make figures FORMATS=pdf      with a PDF of each figure beside its PNG, SVG and CSV
#   make figures STYLE=paper      for a paper: 3.35 or 6.75 inches wide, to figures/out/paper/
#   make figures/out/NAME.svg     one figure and just what it needs (NAME.pdf too)
#   make test                     the tests that can run here (GPU tests skip without a GPU)
#   make test-all                 and the thorough ones: more forms, sizes and processes, docs, wheel
#   make measure [EXPERIMENT=x]   all experiments on this machine, or one; goes on where it stopped
#   make check K=flash_forward    one kernel: compile, run, count, registers and spills
#   make fuzz [FOR_S=60]          random attention, decoding, planned models, killed runs; all checks on
#   make mutations                which small changes of the sources do the tests notice?
#   make bench                    micro-benchmarks (pytest-benchmark)
#   make gpu-run BUDGET_S=480 OUT=dir      one prepared run for a rented GPU, best results first
#   make gpu-run DRY=1                     its plan, with predicted seconds, on any machine
#   make import-results FROM=dir           merge what it left into results/ and judge it
#   make report                   figures, verdicts, a table of predictions and formulas in one HTML file
#   make archive                  records, figures, environment and commit, as a paper's supplement
#   make docs                     the documentation as a web site, in build/docs
#   make doctor                   what this machine can do, and why not the rest
#   make check-install            do the locked versions fit together on every platform? (INSTALL=1: try one)
#   make check-lowest             the oldest versions that pyproject.toml allows: do they work?
#   make lint | make clean
#   make help                     this list
#
# PYTHON=python3.12 chooses the interpreter; NO_VENV=1 uses it as it is and installs nothing.
# From a read-only checkout: VENV, REPRO_RESULTS, REPRO_FIGURES and REPRO_CACHE_DIR name other folders.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

ifdef NO_VENV
PY := $(PYTHON)
ENV :=
else
PY := $(VENV)/bin/python
ENV := $(VENV)/.installed
endif

# One process, one thread: -j and pytest's workers are the parallelism here.
export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1
export FORMATS STYLE

# What is misspelt is refused here, before anything is installed, measured or drawn.
SETTINGS := PYTHON VENV NO_VENV WORKERS FORMATS STYLE EXPERIMENT K HEAD_DIM DTYPE FOR_S BUDGET_S OUT DRY \
    FROM INSTALL UPGRADE MARKED ARGS COMPILERS
HANDED_ON := REPRO_% PYTEST_% CUDA_% CXX CC OMP_NUM_THREADS SHELL MAKE%
STYLES := paper
IMAGES := png svg pdf
comma := ,
asked := $(foreach v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(v)))),$(v)))
unknown := $(filter-out $(SETTINGS) $(HANDED_ON),$(asked))
ifneq (,$(unknown))
$(error no variable $(unknown) here: there are $(SETTINGS). For another program's, write it before make)
endif
ifneq (,$(filter-out $(STYLES),$(STYLE)))
$(error STYLE=$(STYLE) is not $(STYLES), nor nothing, for screens)
endif
ifneq (,$(filter-out $(IMAGES),$(subst $(comma), ,$(FORMATS))))
$(error FORMATS=$(FORMATS): there are $(IMAGES))
endif
ifneq (yes,$(shell [ "$(WORKERS)" -ge 1 ] 2>/dev/null && echo yes))
$(error WORKERS=$(WORKERS) is no number of processes from 1 on)
endif

DRAWN := $(or $(REPRO_FIGURES),figures/out)$(STYLE:%=/%)
STATE := $(if $(REPRO_FIGURES),$(REPRO_FIGURES)/.state,.cache)
STAMPS := $(STATE)/measured
STALE := $(STATE)/stale
DRAWERS := $(filter-out figures/report/% %/__init__.py,$(wildcard figures/*/[a-z]*.py))
FIGURES := $(basename $(notdir $(DRAWERS)))
EXPERIMENTS := $(subst _,-,$(basename $(notdir $(filter-out repro/experiments/shared/%,$(wildcard repro/experiments/*/[a-z]*.py)))))
# Long ones first, so that no core waits for another's last job.
DRAWN_FROM := $(shell sed -n 's/^EXPERIMENTS = (\(.*\))$$/\1/p' $(DRAWERS) | tr -d '",')
LONGEST_FIRST := $(filter $(filter $(EXPERIMENTS),$(DRAWN_FROM)),$(shell \
    awk 'FNR == 1 { last = 0 } /^EXPERIMENT = / { last = 1 } last && sub(/.*seconds=/, "") { print $$0 + 0, FILENAME }' \
    repro/experiments/*/*.py | sort -rn | sed 's|.*/||;s|\.py$$||;y|_|-|'))
ENDINGS := csv png svg $(filter-out png svg,$(subst $(comma), ,$(FORMATS)))
FILES := $(foreach f,$(FIGURES),$(ENDINGS:%=$(DRAWN)/$(f).%))
THEORY := $(wildcard analysis/*.py analysis/*/*.py repro/claims/*.py repro/claims/*/*.py repro/measuring/records.py repro/measuring/row*.py repro/experiments/*.py repro/experiments/*/*.py)
MACHINERY := $(wildcard kernels/*.cu kernels/*.py kernels/*/*.* repro/*.py repro/measuring/*.py)

# Two jobs unless asked otherwise. What is timed still runs alone, under a lock (repro/measuring/quiet.py).
ifeq (,$(filter -j% --jobs%,$(MAKEFLAGS)))
MAKEFLAGS += -j2
endif

.PHONY: help again figures test test-all check measure fuzz mutations gpu-run import-results bench report archive docs doctor check-install check-lowest lock lint readme record audit clean
.DELETE_ON_ERROR:
.SECONDARY:

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

# Each style has its own files, and its own word on whether they are up to date.
ALL_DRAWN := $(STALE)/.drawn$(STYLE:%=-%)
figures: $(LONGEST_FIRST:%=$(STAMPS)/%) $(ALL_DRAWN) $(DRAWN)/verdicts.md

# A figure that has to be drawn again is younger here than in figures/out/.
$(FIGURES:%=$(STALE)/%): figures/common.py $(wildcard figures/_[a-z]*.py figures/*/_[a-z]*.py) $(THEORY) | $(ENV)
	@mkdir -p $(@D) && touch $@

# All of them at once, and the verdicts with them: starting Python costs more than drawing, and both
# ask for the same predictions. Dated when it begins, so that the verdicts are younger.
$(ALL_DRAWN): $(FIGURES:%=$(STALE)/%) $(if $(filter-out $(wildcard $(FILES)),$(FILES)),again)
	@mkdir -p $(DRAWN) && touch $@.begun
	@stale=; for f in $(FIGURES); do for e in $(ENDINGS); do \
	    [ -e $(DRAWN)/$$f.$$e ] && [ -z "$$(find $(STALE)/$$f -newer $(DRAWN)/$$f.$$e)" ] || \
	    { stale="$$stale $$f"; break; }; done; done; \
	[ -z "$$stale" ] || $(PY) -m figures draw --jobs $(WORKERS) --verdicts $$stale
	@mv $@.begun $@

# One figure by its file. A pattern rule with three targets runs once for all three, under -j too.
$(DRAWN)/%.svg $(DRAWN)/%.png $(DRAWN)/%.csv: $(STALE)/%
	@$(PY) -m figures draw $*

$(DRAWN)/%.pdf: $(STALE)/%
	@FORMATS=pdf $(PY) -m figures draw $*

# The experiments of a figure are the tuple EXPERIMENTS in its module, which must fit one line.
experiments_of = $(shell sed -n 's/^EXPERIMENTS = (\(.*\))$$/\1/p' $(1) | tr -d '",')
define needs
$(STALE)/$(basename $(notdir $(1))): $(1) $(addprefix $(STAMPS)/,$(filter $(EXPERIMENTS),$(2))) \
    $(foreach x,$(2),$(wildcard results/*/$(x).jsonl))
endef
$(foreach f,$(DRAWERS),$(eval $(call needs,$(f),$(call experiments_of,$(f)))))

$(DRAWN)/verdicts.md: $(ALL_DRAWN) $(wildcard figures/verdict_table.py)
	@[ -z "$$(find $^ -newer $@ 2>&1)" ] || $(PY) -m figures verdicts

# Which cells are on record is decided by the command; the stamp only says that it has run.
$(STAMPS)/%: $(THEORY) $(MACHINERY) | $(ENV)
	@$(PY) -m repro measure --quick $*
	@mkdir -p $(STAMPS) && touch $@

measure: | $(ENV)
	@$(PY) -m repro measure $(EXPERIMENT)

# A worker that crashes ends the run with the test's name: started again, xdist may wait for ever.
test: | $(ENV)
	@workers=$$($(PY) -c 'import xdist' 2>/dev/null && \
	    echo "-n $(WORKERS) --dist loadfile --max-worker-restart=0"); \
	$(PY) -m pytest $$workers --benchmark-skip -m "$(or $(MARKED),not thorough)" $(ARGS)

# Two runs, so that what is wrong with the shorter one is known first.
test-all: test
	@$(MAKE) --no-print-directory test MARKED=thorough

HEAD_DIM ?= 64
DTYPE ?= bf16
check: | $(ENV)
	@test -n "$(K)" || { echo "error: which kernel? make check K=flash_forward" >&2; exit 1; }
	@$(PY) -m repro dev check "$(K)" --head-dim $(HEAD_DIM) --dtype $(DTYPE)

FOR_S ?= 60
fuzz: | $(ENV)
	@FUZZ_SECONDS=$(FOR_S) $(PY) -m pytest -q tests/fuzz $(ARGS)

# Each in a copy of the tree; goes on where it stopped. Hours: ARGS="--only window" takes some.
mutations: | $(ENV)
	@$(PY) tests/mutations/run.py $(ARGS)

# On a rented machine nothing is installed: NO_VENV=1 PYTHON=python3 make gpu-run OUT=...
BUDGET_S ?= 480
gpu-run: | $(ENV)
	@test -n "$(OUT)$(DRY)" || { echo "error: where to? make gpu-run OUT=dir" >&2; exit 1; }
	@$(PY) -m repro.gpu.run --budget-s $(BUDGET_S) $(if $(DRY),--dry,--out "$(OUT)") $(ARGS)

import-results: | $(ENV)
	@test -n "$(FROM)" || { echo "error: from where? make import-results FROM=dir" >&2; exit 1; }
	@$(PY) -m figures import-results "$(FROM)"

bench: | $(ENV)
	@$(PY) -m pytest tests/bench/*.py --benchmark-only -q $(ARGS)

report: $(DRAWN)/report.html

$(DRAWN)/report.html: $(ALL_DRAWN) $(DRAWN)/verdicts.md $(wildcard figures/*.py figures/*/* results/*/*.jsonl) $(THEORY) $(MACHINERY)
	@$(PY) -m figures report

archive: report
	@$(PY) -m repro archive

docs: | $(ENV)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet -f docs/mkdocs.yml

doctor: | $(ENV)
	@$(PY) -m repro doctor

# Both resolve, as on a machine without any wheel or setting of its own; metadata only.
check-install:
	@$(PYTHON) .ci/lock.py check $(if $(INSTALL),--install)

# torch stays as it is locked: its oldest version needs gigabytes of CUDA even where there is no GPU.
LOWEST := build/lowest
SMOKE := test_analysis_traffic test_analysis_symbolic test_records test_commands_predict test_checkpoint_executor
check-lowest:
	@mkdir -p $(LOWEST)
	@$(PYTHON) .ci/lock.py lowest $(LOWEST)/requirements.txt
	@test ! -s $(LOWEST)/requirements.txt || { $(PYTHON) -m venv --clear $(LOWEST)/venv && \
	    $(LOWEST)/venv/bin/python -m pip install -q --disable-pip-version-check -r $(LOWEST)/requirements.txt && \
	    $(LOWEST)/venv/bin/python -m pytest -q -n $(WORKERS) --dist loadfile $(SMOKE:%=tests/*/%.py); }

# For the authors: pyproject.toml has changed. UPGRADE=1 takes the newest of everything.
lock:
	@$(PYTHON) .ci/lock.py write $(if $(UPGRADE),--upgrade)

lint: | $(ENV)
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(dir $(PY))lint-imports

# For the authors, on an idle machine: measure everything anew for the committed records.
record: | $(ENV)
	@$(PY) -m repro measure --again --into host $(EXPERIMENT)
	@$(PY) -m figures readme

# For the authors: registers, spills and instructions of every kernel, in docs/kernel-audit.csv.
audit: | $(ENV)
	@$(PY) -m repro dev audit

# For the authors: the README's tables and pictures, from the records that are committed.
readme: | $(ENV)
	@$(PY) -m figures readme

clean:
	rm -rf $(VENV) .cache figures/out results/local build *.egg-info

CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \(1[23]\)\..*/,cuda\1/p')
COMPILERS ?= $${CXX:-c++ g++ clang++}
PACKAGES := analysis kernels repro figures

$(VENV)/.installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "error: $(PYTHON) is missing or older than Python 3.11; set PYTHON=..." >&2; exit 1; }
	@for c in $(COMPILERS); do command -v "$$c" >/dev/null && exit 0; done; \
	    echo "error: no C++ compiler ($(COMPILERS)); install one or set CXX=..." >&2; exit 1
	@echo "installing into $(VENV) (torch is the large part)"
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "error: $(PYTHON) cannot make a virtual environment (package python3-venv?)" >&2; exit 1; }
	@if [ -w . ]; then what="-e ."; else what="$(VENV)/source" && mkdir -p "$$what" && \
	    cp -R pyproject.toml setup.py README.md LICENSE $(PACKAGES) results "$$what"; fi; \
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c requirements.lock \
	    $$what"[test,dev,docs$(CUDA)]"
	@touch $@
