"""The engine stage on TensorRT-LLM around its start and its end, without a server."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inflight.text.tokenizer import Tokenizer
from tests.trtllm.support.driving import deployment

MODEL = Path(__file__).parents[2] / "backends/trtllm_engine/model.py"


@pytest.fixture
def backend(fake: None, triton_api: Callable[[ModuleType], None]) -> Any:
    """The backend's module, where Triton's Python API has nothing in it."""
    triton_api(ModuleType("triton_python_backend_utils"))
    spec = importlib.util.spec_from_file_location("trtllm_engine_model", MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stage(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(backend.adapter, "deployment", deployment)
    monkeypatch.setattr(backend.adapter, "deployment_directory", lambda: Path())
    monkeypatch.setattr(backend, "check_deployment", lambda directory: None)
    return backend.TritonPythonModel()


def test_a_start_that_fails_late_ends_tensorrt_llm(stage: Any) -> None:
    before = set(threading.enumerate())
    with pytest.raises(AttributeError, match="MetricFamily"):  # the stage's metrics come after its engine
        stage.initialize({"model_config": "{}", "model_name": "tensorrt_llm", "model_version": "1"})
    assert set(threading.enumerate()) <= before


def test_tensorrt_llm_ends_though_the_stage_does_not(stage: Any) -> None:
    before = set(threading.enumerate())
    given = deployment()
    stage.make_engine(given, Tokenizer.from_checkpoint(given.model))
    with pytest.raises(AttributeError, match="_loop"):
        stage.finalize()
    assert set(threading.enumerate()) <= before


def test_only_the_server_of_the_start_is_ended(
    backend: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[tuple[int, int]] = []
    parent = [4711]
    monkeypatch.setattr(os, "getppid", lambda: parent[0])
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    end = backend.process.server_ender()
    with caplog.at_level(logging.ERROR, "inflight"):
        end()
        assert sent == [(4711, signal.SIGTERM)]
        parent[0] = 1
        end()
    assert len(sent) == 1
    assert "has ended already" in caplog.text
