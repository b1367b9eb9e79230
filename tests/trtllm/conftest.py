"""The fake TensorRT-LLM, and engines on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.resources import DEMO
from inflight.settings.deployment import Deployment
from inflight.text.tokenizer import Tokenizer
from inflight.trtllm.engine import TrtLlmEngine
from inflight.trtllm.factory import make_engine
from tests.trtllm.support.fake_package import importable


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(DEMO / "model")


@pytest.fixture
def prompt(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_batch(["What is a paged KV cache?"], add_special_tokens=True)[0]


@pytest.fixture
def fake() -> Iterator[None]:
    with importable():
        yield


@pytest.fixture
def set_fault(fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that sets the fake's faults, all at once."""
    path = tmp_path / "faults.json"
    path.write_text("{}")
    monkeypatch.setenv("FAKE_TENSORRT_LLM", str(path))

    def write(**faults: object) -> None:
        path.with_suffix(".new").write_text(json.dumps(faults))
        path.with_suffix(".new").replace(path)  # the fake reads it in threads of its own

    return write


@pytest.fixture
def start(fake: None, tokenizer: Tokenizer) -> Iterator[Callable[..., TrtLlmEngine]]:
    """Returns a function that makes an engine; it ends with the test."""
    engines = []

    def make(given: Deployment, on_death: Callable[[], object] = lambda: None) -> TrtLlmEngine:
        engines.append(make_engine(given, tokenizer, on_death))
        return engines[-1]

    yield make
    for engine in engines:  # a dead engine leaves its LLM to the end of the process, which here comes much later
        (engine._runtime if engine._watchdog.dead else engine).close()
