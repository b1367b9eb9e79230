# The verbs of this project. `make setup` makes .venv; every other target needs it.
PYTHON ?= python3
PIP_FLAGS ?=
EXTRAS ?= engine,build,load,dev
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup serve demo engine test test-fast lint contract dashboards gpu-test gpu-bench train-demo train-draft clean

setup: $(STAMP)

define SYSTEM_CHECK
import importlib.util, pathlib, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
if not (3, 10) <= sys.version_info[:2] <= (3, 12):
    sys.exit("Python %s is not supported: use 3.10, 3.11 or 3.12, e.g. make serve PYTHON=python3.11" % version)
library = "libpython%s.so.1.0" % version
places = [sys.base_prefix + "/lib", "/usr/lib/" + (sysconfig.get_config_var("MULTIARCH") or ""), "/usr/lib64"]
missing = [] if importlib.util.find_spec("ensurepip") else ["python%s-venv" % version]
missing += [] if any(pathlib.Path(p, library).is_file() for p in places) else ["libpython%s" % version]
sys.exit("missing system packages; install them with: apt-get install " + " ".join(missing) if missing else 0)
endef
export SYSTEM_CHECK

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c "$$SYSTEM_CHECK"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(BIN)/pip install --quiet $(PIP_FLAGS) --no-deps nvidia-pytriton==0.7.0
	@touch $@

serve: setup
	@exec $(BIN)/inflight serve $(ARGS)

demo: setup
	@exec $(BIN)/inflight demo

# make engine MODEL=path/to/checkpoint GPU=h100 PRECISION=fp8 ARGS="--kl-budget 0.01"
MODEL ?= deployments/demo/model
engine: setup
	@$(BIN)/python build/build_engine.py --model $(MODEL) $(if $(GPU),--gpu $(GPU)) \
	    $(if $(PRECISION),--precision $(PRECISION)) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What looks at times runs after all else, which has a worker for each core, 8 at most; in `test` one more, since one of
# them mostly waits. ARGS are pytest's, of one run without workers.
WORKERS = $$(cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores : 8)))
TOGETHER = OMP_NUM_THREADS=1 $(BIN)/pytest --dist loadgroup --no-loadscope-reorder
test: setup
	@$(if $(ARGS),$(BIN)/pytest $(ARGS),status=0; \
	$(TOGETHER) -n $$(($(WORKERS) + 1)) -m "not alone and not docker" || status=1; \
	$(BIN)/pytest -m "alone or docker" || status=1; \
	exit $$status)

test-fast: setup
	@status=0; \
	$(TOGETHER) -n $(WORKERS) -m "not slow and not alone and not docker" || status=1; \
	$(BIN)/pytest -m "not slow and alone" || status=1; \
	exit $$status

contract: setup
	$(BIN)/python -m inflight.serve.pbtxt model_repository
	$(BIN)/python -m inflight.serve.reference docs

# make dashboards RUNBOOKS=https://wiki.example/runbooks
dashboards: setup
	$(BIN)/python -m inflight.monitoring.rules monitoring/rules $(if $(RUNBOOKS),--runbooks $(RUNBOOKS))
	$(BIN)/python -m inflight.monitoring.dashboards monitoring/dashboards $(if $(RUNBOOKS),--runbooks $(RUNBOOKS))

# On a machine with an NVIDIA GPU. GPU_PYTHON is any Python with torch, triton, transformers, pytest and Inflight's base
# dependencies: make gpu-test gpu-bench GPU_PYTHON=python3 needs no set-up and no network.
GPU_PYTHON ?= $(BIN)/python
gpu-test:
	@TRITON_INTERPRET=0 PYTHONPATH=. $(GPU_PYTHON) -m pytest tests/gpu -rs $(ARGS)

gpu-bench:
	@TRITON_INTERPRET=0 PYTHONPATH=. $(GPU_PYTHON) -m inflight.bench.gpu --output docs/results/gpu $(ARGS)

train-demo: setup
	$(BIN)/python build/train_demo.py

train-draft: setup
	$(BIN)/python build/train_draft.py

clean:
	rm -rf $(VENV) artifacts
