"""The walk of one decoded token in docs/data-path.md, against the files whose functions run for one."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.client import GenerateOptions, HttpClient, sync
from inflight.settings.deployment import resolve
from tests.support.fake_server import FakeServer
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "deployments/demo"
PAGE = ROOT / "docs/data-path.md"
TOKENS, ALL_TOKENS = range(8, 40), 48
"""The tokens that are followed in the engine's stage: more than a block of the KV cache holds, none at an end."""
MIDDLE = 4
"""How many responses at either end of a stream are not followed."""
ROW = re.compile(r"^\| (\d+) \| `((?:inflight|backends)/[\w/]+\.py)` \|", re.MULTILINE)


class Walk:
    """Notes whose functions run while it follows: in this thread, and in those that began meanwhile.

    The threads that compile guides are left out: they make one ready as the engine starts, which may last until then.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._follows = False

    def __enter__(self) -> Walk:
        threading.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]

    def follow(self, follows: bool) -> None:
        self._follows = follows

    @contextmanager
    def following(self, follows: bool) -> Iterator[None]:
        self._follows = follows
        sys.setprofile(self._note if follows else None)
        yield
        sys.setprofile(None)
        self._follows = False

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self._follows and threading.current_thread().name != "guides":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("inflight", "backends"):
                self.files.add(str(path.relative_to(ROOT)))


class Tensor:
    """Triton's, as far as a stage uses it."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self.as_numpy = (lambda: name), (lambda: array)


class Request:
    """A request to a stage, and the side of its responses; ``on_sent`` is called with how many tokens have come."""

    def __init__(self, arrays: dict[str, np.ndarray], on_sent: Callable[[int], None] = lambda tokens: None) -> None:
        self.inputs = lambda: [Tensor(name, array) for name, array in arrays.items()]
        self.parameters, self.request_id = (lambda: ""), (lambda: "")
        self.is_cancelled = lambda: False
        self.get_response_sender = lambda: self
        self.responses: list[dict[str, np.ndarray]] = []
        self.ended = threading.Event()
        self._on_sent = on_sent

    def send(self, response: Any = None, flags: int = 0) -> None:
        if response is not None:
            assert response.error is None, response.error
            self.responses.append({tensor.name(): tensor.as_numpy() for tensor in response.tensors})
            self._on_sent(sum(one["output_ids"].size for one in self.responses if "output_ids" in one))
        if flags:
            self.ended.set()


@pytest.fixture
def stub(triton_api: Callable[[ModuleType], None]) -> None:
    api = ModuleType("triton_python_backend_utils")
    api.Tensor = Tensor  # type: ignore[attr-defined]
    api.InferenceResponse = lambda tensors=(), error=None: SimpleNamespace(tensors=tensors, error=error)  # type: ignore[attr-defined]
    api.TritonError = lambda message, code=None: message  # type: ignore[attr-defined]
    api.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
    triton_api(api)


def _stage(backend: str, model: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stage of the demo deployment that is ready."""
    from inflight.triton import adapter

    deployment = resolve({"model": str(DEMO / "model"), "observability": {"metrics": False}}, DEMO, "test")
    monkeypatch.setattr(adapter, "deployment", lambda: deployment)
    spec = importlib.util.spec_from_file_location(f"{backend}_model", ROOT / f"backends/{backend}/model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stage = module.TritonPythonModel()
    config = json.dumps({"model_transaction_policy": {"decoupled": True}})
    stage.initialize({"model_config": config, "model_name": model, "model_version": "1"})
    return stage


def _arrays() -> dict[str, np.ndarray]:
    flag = np.ones((1, 1), np.bool_)
    values = {"input_ids": [[5, 6, 7, 8]], "input_lengths": [[4]], "request_output_len": [[ALL_TOKENS]]}
    return {name: np.array(value, np.int32) for name, value in values.items()} | {
        "streaming": flag,
        "heartbeat": flag,
        "ignore_eos": flag,
    }


def _detokenize(walk: Walk, stage: Any, responses: list[dict[str, np.ndarray]]) -> list[str]:
    """Return the texts of the responses. They come twice, as two streams: the second one's tokens have been met."""
    for key in (1, 2):
        texts = []
        for number, response in enumerate(responses):
            call = Request(response | {"stream_key": np.array([[key]], np.int64)})
            with walk.following(key == 2 and MIDDLE <= number < len(responses) - MIDDLE):
                stage.execute([call])
            texts += [one["text_output"].item().decode() for one in call.responses]
    return texts


@pytest.mark.proof
def test_the_walk_of_a_token_is_that_of_the_page(stub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with Walk() as walk:
        engine, detokenizer = (
            _stage(backend, model, monkeypatch)
            for backend, model in (("inflight_engine", "tensorrt_llm"), ("detokenizer", "detokenizer"))
        )
        # Where a machine stands still, the engine waits for its responses: what is followed is one step, not several.
        step, streams = engine._loop._engine.step, engine._streams
        engine._loop._engine.step = lambda: wait_until(lambda: not streams._due, every_s=0.001) and step()
        request = Request(_arrays(), lambda tokens: walk.follow(tokens in TOKENS))
        engine.execute([request])
        assert request.ended.wait(60)
        texts = _detokenize(walk, detokenizer, request.responses)
        engine.finalize()
        detokenizer.finalize()
        sync._start_loop.cache_clear()  # the clients' own thread, begun anew
        with FakeServer(pieces=tuple(texts)) as server, HttpClient(f"127.0.0.1:{server.http_port}") as client:
            stream = client.stream("x", GenerateOptions())
            for number in range(len(texts)):
                with walk.following(MIDDLE <= number < len(texts) - MIDDLE):
                    next(stream)
            stream.cancel()
    page = {path: int(number) for number, path in ROW.findall(PAGE.read_text())}
    assert list(page.values()) == list(range(1, len(page) + 1)), "the rows are numbered"
    assert sorted(page) == sorted(walk.files), "docs/data-path.md lists other files than a token crosses"
