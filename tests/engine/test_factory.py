"""What the factory makes of a deployment."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from inflight.engine import model_runner
from inflight.engine.factory import make_engine
from inflight.engine.model_runner import ModelRunner
from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.settings.deployment import load_deployment
from inflight.text.tokenizer import Tokenizer


@pytest.fixture
def frozen() -> Iterator[None]:
    """Begin without what another test may have left, and undo what the engine's own process never undoes."""
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
def test_pythons_collector_leaves_alone_what_serves() -> None:
    deployment = load_deployment(DEMO)
    engine = make_engine(deployment, Tokenizer.from_checkpoint(deployment.model))
    assert gc.get_freeze_count() > 50_000
    assert len(gc.get_objects()) < 10_000
    assert not engine.busy


@pytest.mark.sweep
@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Cannot allocate memory (os error 12)"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("could not create a memory object"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["python", "gpu", "cpu", "onednn", "cublas"],
)
@pytest.mark.parametrize(
    "where",
    [(model_runner, "native_model"), (ModelRunner, "warm_up"), (ModelRunner, "run")],
    ids=["load", "graphs", "first step"],
)
def test_a_lack_of_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, where: tuple[object, str], error: Exception
) -> None:
    deployment = load_deployment(DEMO)
    tokenizer = Tokenizer.from_checkpoint(deployment.model)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(*where, fail)
    with pytest.raises(DeploymentError, match="not enough memory on cpu for the model") as raised:
        make_engine(deployment, tokenizer)
    assert str(error).partition("\n")[0] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_other_faults_of_a_start_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = load_deployment(DEMO)

    def fail(*_: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(model_runner, "native_model", fail)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        make_engine(deployment, Tokenizer.from_checkpoint(deployment.model))


def test_a_replay_is_made_without_pytorch() -> None:
    """To import it takes most of the time in which such a server starts."""
    program = f"""
import sys
from inflight.settings.deployment import validate
from inflight.engine.factory import make_engine
from inflight.text.tokenizer import Tokenizer
from inflight.triton import debug_snapshot, request_reader, streams
from inflight.triton.tracing import stages
deployment = validate({{"model": {str(DEMO / "model")!r}, "engine": {{"kind": "replay"}}}}, "")
make_engine(deployment, Tokenizer.from_checkpoint(deployment.model))
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
