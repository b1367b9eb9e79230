"""The fake TensorRT-LLM, and engines on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.deployment import Deployment, resolve
from inflight.engine.request import Output, Request
from inflight.resources import DEMO
from inflight.sampling import SamplingParams
from inflight.text.tokenizer import Tokenizer
from inflight.trtllm.engine import TrtLlmEngine
from inflight.trtllm.factory import make_engine
from tests.trtllm.fake import importable

Settings = dict[str, Any]


def deployment(directory: Path = DEMO, **settings: Any) -> Deployment:
    """Return the demo deployment on TensorRT-LLM, with more settings; their paths are relative to ``directory``."""
    data = {"model": str(DEMO / "model"), "engine": {"kind": "trtllm", "dtype": "float32"}}
    return resolve(data | settings, directory, "test")


def checkpoint(directory: Path, **config: Any) -> Deployment:
    """Return a deployment of the demo model with other values in its ``config.json``; None: without the key."""
    read = json.loads((DEMO / "model/config.json").read_text()) | config
    for file in (DEMO / "model").iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    (directory / "config.json").write_text(json.dumps({key: one for key, one in read.items() if one is not None}))
    return deployment(directory, model=str(directory))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(DEMO / "model")


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
    return lambda **faults: path.write_text(json.dumps(faults)) and None


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


def ask(prompt: list[int], **sampling: Any) -> Request:
    """Return a request; ``max_tokens`` is 16 unless given."""
    return Request(prompt, SamplingParams(**{"max_tokens": 16} | sampling))


def run(engine: Any, *requests: Request) -> list[Output]:
    """Run requests to their ends; return one whole output of each, in order."""
    from inflight.triton.responses import join

    whole: dict[int, Output | None] = {request.key: None for request in requests}
    for request in requests:
        engine.validate(request)
        engine.submit(request)
    while engine.busy:
        for output in engine.step():
            whole[output.key] = join(whole[output.key], output)
    return [output for output in whole.values() if output is not None]
