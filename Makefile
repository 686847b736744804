# All set-up happens here: `make quickstart` and `make test` work on a fresh machine with Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_DIR ?= runs/quickstart
VISION_DIR ?= runs/vision
# One thread per process: on shared cores more threads are slower.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
# Compiled tests are kept: without them every test process prepares all of them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install quickstart test test-fast test-eval test-lowest check docs docs-check faults fuzz
.PHONY: format tiny-model vision clean

help:  ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What runs need; development tools come on top of it.
$(VENV)/.runs: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (PyTorch first, a few minutes on a fresh machine)"
	$(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed: $(VENV)/.runs
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,code,log,docs,serve]'
	@touch $@

install: $(VENV)/.installed  ## Make .venv and install the project with its development tools

# Traces, TraceLock and benchmark of one embedded model: the experiments, and the files of its domain on top.
OVERLAY = $(if $(filter-out tiny,$*),--config domain/$*$(1))
BENCHMARK = $(if $(filter pictures,$*),evaluate_tiny,benchmark_tiny)
main-job-%:
	$(BIN)/lit-dlm predict --config exp/generate_tiny $(call OVERLAY,_train) --run_dir $(RUN_DIR)/$*
	$(BIN)/lit-dlm fit --config exp/tracelock_tiny $(call OVERLAY) --run_dir $(RUN_DIR)/$* --ckpt_path last
	$(BIN)/lit-dlm predict --config exp/$(BENCHMARK) $(call OVERLAY,_test) --run_dir $(RUN_DIR)/$*

quickstart: $(VENV)/.runs  ## The main job on two embedded models: traces, TraceLock, benchmark (about 6 minutes)
	@mkdir -p $(RUN_DIR)
	@echo "The second model runs beside the first; what it tells is in $(RUN_DIR)/planning.log, and follows"
	@$(MAKE) main-job-planning > $(RUN_DIR)/planning.log 2>&1 & \
	  $(MAKE) main-job-tiny; first=$$?; \
	  wait $$!; second=$$?; cat $(RUN_DIR)/planning.log; test $$first$$second = 00
	$(BIN)/lit-dlm report $(RUN_DIR)/tiny $(RUN_DIR)/planning --out $(RUN_DIR)

vision: $(VENV)/.runs  ## Pictures on the embedded model: questions, TraceLock, TraceRL, drawing (about 3 minutes)
	$(MAKE) main-job-pictures RUN_DIR=$(VISION_DIR)
	$(BIN)/lit-dlm predict --config exp/draw_pictures --run_dir $(VISION_DIR)/drawing
	$(BIN)/lit-dlm fit --config exp/tracerl_tiny --config domain/drawings_rl --run_dir $(VISION_DIR)/rl --ckpt_path last
	$(BIN)/lit-dlm report $(VISION_DIR)/pictures $(VISION_DIR)/drawing --out $(VISION_DIR)
	$(BIN)/python experiments/picture_examples.py --questions $(VISION_DIR)/pictures --drawings $(VISION_DIR)/drawing --out $(VISION_DIR)/pictures.png

tiny-model: $(VENV)/.runs  ## Train the embedded models again (about two hours on two cores)
	$(BIN)/lit-dlm fit --config exp/pretrain_tiny --ckpt_path last
	$(BIN)/lit-dlm fit --config exp/pretrain_planning --ckpt_path last
	$(BIN)/pip install --quiet scikit-learn
	$(BIN)/lit-dlm fit --config exp/pretrain_pictures --ckpt_path last

test: install  ## Run all tests (about ten minutes on two cores)
	$(BIN)/python -m pytest -m "not gpu and not docs" -n 2 --dist loadscope --no-loadscope-reorder

test-fast: install  ## Run the unit tests only (under a minute)
	$(BIN)/python -m pytest -m "not gpu and not slow and not ddp" -n 2 --dist loadscope --no-loadscope-reorder

# In an environment of its own, on top of the other: what lm-eval brings slows every import of transformers.
test-eval: install  ## Run the tests of lm-eval and scikit-learn, which the other environment lacks
	test -d $(VENV)-eval || $(PYTHON) -m venv $(VENV)-eval
	ls -d $(abspath $(VENV))/lib/python3*/site-packages > $$(ls -d $(VENV)-eval/lib/python3*/site-packages)/base.pth
	$(VENV)-eval/bin/pip install --quiet --constraint constraints.txt 'lm-eval[ifeval,api]>=0.4.13'
	$(VENV)-eval/bin/python -m pytest tests/commands/test_lm_eval.py tests/toy/test_pictures.py \
	  'tests/e2e/test_experiments.py::test_experiment_runs[pretrain_pictures]'

test-lowest:  ## Run the unit tests on the lowest versions that pyproject.toml allows
	test -d $(VENV)-lowest || $(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/pip install --quiet uv
	$(VENV)-lowest/bin/uv pip install --quiet --python $(VENV)-lowest --resolution lowest-direct \
	  --editable '.[dev,code,log]'
	$(VENV)-lowest/bin/python -m pytest -m "not gpu and not slow and not ddp" -n 2 --dist loadscope

check: install  ## Lint, types, layers and tests, as CI runs them
	.ci/run

docs-check: install  ## Run the long commands of the documents and compare their numbers (half an hour)
	$(BIN)/python -m pytest -m docs tests/test_docs_check.py tests/e2e/test_real_model.py

faults: install  ## Let runs meet faults and compare what they leave (an hour; goes on where it was)
	$(BIN)/python experiments/faults.py

docs: install  ## Build the documentation site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.PHONY: hashes audit
hashes:  ## Write constraints-hashed.txt: constraints.txt with the hash of every file (needs uv)
	grep -v '^torch==' constraints.txt | uv pip compile --quiet --no-deps --generate-hashes \
	    --no-annotate --custom-compile-command 'make hashes' - --output-file constraints-hashed.txt

audit:  ## Look the pinned versions up among known vulnerabilities (needs uv and the network)
	uvx pip-audit --no-deps --disable-pip --requirement constraints.txt

fuzz: install  ## Look for inputs that break readers and graders, other ones each time (half an hour)
	$(BIN)/python -m pytest --hypothesis-profile=fuzz --hypothesis-show-statistics tests/test_fuzz.py tests/grading/test_fuzz.py

format: install  ## Format the code
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean:  ## Remove caches and build output (not runs/)
	rm -rf build *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
