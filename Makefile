# The verbs of this project. Each brings into .venv what it needs, the first time that it runs.
PYTHON ?= python3
# More options of pip, e.g. PIP_FLAGS="--extra-index-url URL".
PIP_FLAGS ?=
export PIP_FLAGS
# Hundreds of the tests' processes would compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
SETUP = @$(PYTHON) scripts/setup.py
EVERYTHING := engine,serve,door,load,build,dev

.PHONY: setup serve demo engine test check release lint bench peers clients published contract dashboards compile-test image-locks door-files gpu-test gpu-contact gpu-wheels gpu-report gpu-predictions train-demo train-draft clean

# Everything, or what is named: make setup EXTRAS=engine,serve
EXTRAS ?= $(EVERYTHING)
setup:
	$(SETUP) $(EXTRAS)

serve:
	$(SETUP) engine,serve
	@exec $(BIN)/inflight serve $(ARGS)

demo:
	$(SETUP) engine,serve
	@exec $(BIN)/inflight demo

# make engine MODEL=path/to/checkpoint GPU=h100 PRECISION=fp8 ARGS="--kl-budget 0.01"
MODEL ?= deployments/demo/model
engine:
	$(SETUP) engine,build
	@$(BIN)/python build/build_engine.py --model $(MODEL) $(if $(GPU),--gpu $(GPU)) \
	    $(if $(PRECISION),--precision $(PRECISION)) $(ARGS)

lint:
	$(SETUP) $(EVERYTHING)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# `test` has what is proven in short. `check` has the tests and the long proofs that the change can reach:
# BASE=REV says since when, and tests/runner/base.py what counts without it. `release` has everything, and writes down
# that it passed. ARGS are pytest's, of one process, instead of all that.
RUN = $(BIN)/python -m tests.runner
test:
	$(SETUP) $(EVERYTHING)
	@$(if $(ARGS),$(BIN)/pytest $(ARGS),$(RUN) test)

check:
	$(SETUP) $(EVERYTHING)
	@$(RUN) check

release:
	$(SETUP) $(EVERYTHING)
	@$(RUN) release --record

# make bench ARGS="engine --streams 8": what measures Inflight itself; make bench lists it.
bench:
	$(SETUP) $(EVERYTHING)
	@exec $(BIN)/python -m benchmarks $(or $(ARGS),--help)

# The environments of the peers that `make bench ARGS=peers` measures Inflight beside: all, or make peers ARGS=vllm.
peers:
	$(SETUP) $(EVERYTHING)
	@$(BIN)/python -m benchmarks.peers.environments $(ARGS)

# The environments of the programs that the gateway is tried with: all, or make clients ARGS=sdks.
clients:
	$(SETUP) $(EVERYTHING)
	@$(BIN)/python -m benchmarks.clients $(ARGS)

# The tests with models and tokenizers as others have published them; these are fetched once, into the user's cache.
published:
	$(SETUP) $(EVERYTHING)
	@$(BIN)/python -m benchmarks.published.fetched
	@$(BIN)/pytest -m published tests/published $(ARGS)

contract:
	$(SETUP)
	$(BIN)/python scripts/write_pbtxt.py model_repository
	$(BIN)/python scripts/write_reference.py docs

# The packages of the images with their hashes, after a change of pyproject.toml or constraints.txt. TORCH is a folder or
# an index page with the CPU build of PyTorch.
TORCH ?= https://download.pytorch.org/whl/cpu/torch/
image-locks:
	@$(PYTHON) scripts/lock_images.py --torch $(TORCH)

# What the Envoy of the profile `replicas` reads, after a change of the door.
door-files:
	$(SETUP)
	$(BIN)/inflight door deployments/demo --host 0.0.0.0 --replica replica-1:8000:8001:8080 \
		--replica replica-2:8000:8001:8080 --write docker/replicas --seen-as /etc/inflight

# make dashboards RUNBOOKS=https://wiki.example/runbooks
dashboards:
	$(SETUP) dev
	$(BIN)/python -m monitoring.generate $(if $(RUNBOOKS),--runbooks $(RUNBOOKS))

# On a machine with an NVIDIA GPU: docs/first-contact.md. GPU_PYTHON is any Python with torch, triton, transformers,
# psutil, pytest and the packages of `make gpu-wheels`: make gpu-contact ARGS=A GPU_PYTHON=python3 needs no set-up and no
# network.
GPU_PYTHON ?= $(BIN)/python
# Processes: a CUDA error spoils the one that it happens in. ARGS replaces them.
GPU_WORKERS ?= 6
gpu-test:
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) scripts/check_gpu_python.py
	@TRITON_INTERPRET=0 PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m pytest tests/gpu -rs $(or $(ARGS),-n $(GPU_WORKERS) --dist load)

gpu-contact:
	@PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m benchmarks.contact $(ARGS)

# What a GPU machine without a network may lack, as wheels for its Python.
WHEELS_PYTHON ?= 3.12
PACKAGES ?= pydantic
gpu-wheels:
	$(SETUP)
	$(BIN)/python -m pip download -q --only-binary=:all: --python-version $(WHEELS_PYTHON) --implementation cp \
		--platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 -c constraints.txt -d artifacts/gpu-wheels $(PACKAGES)

# The kernels, compiled to machine code by another version of Triton than the one that is pinned.
OTHER_TRITON ?= 3.6.0
compile-test:
	$(SETUP) dev,engine
	$(BIN)/python -m pip install -q --no-deps --upgrade --target artifacts/triton-$(OTHER_TRITON) triton==$(OTHER_TRITON)
	INFLIGHT_TRITON=artifacts/triton-$(OTHER_TRITON) $(BIN)/python -m pytest -q \
		tests/engine/test_kernels_compile.py tests/engine/test_between_compile.py \
		tests/engine/test_attention_compile.py

# The page of what was measured on GPUs.
gpu-report:
	$(SETUP)
	$(BIN)/python -m benchmarks.contact.report docs/results/gpu/first-contact

# What is predicted for an H200, from the code as it is compiled for one.
gpu-predictions:
	$(SETUP) $(EVERYTHING)
	$(BIN)/python -m benchmarks.contact.launches docs/results/gpu/launches.json
	$(BIN)/python -m benchmarks.contact.predict docs/results/gpu

train-demo:
	$(SETUP) $(EVERYTHING)
	$(BIN)/python build/train_demo.py

train-draft:
	$(SETUP) $(EVERYTHING)
	$(BIN)/python build/train_draft.py

clean:
	rm -rf $(VENV) artifacts
