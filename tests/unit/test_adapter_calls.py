"""Calls from stage to stage, against what Triton's stub does with an answer (before 24.12)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

FREED_IN: list[str] = []


class Answer:
    """Notes the thread in which it is freed."""

    def has_error(self) -> bool:
        return False

    def __del__(self) -> None:
        FREED_IN.append(threading.current_thread().name)


class Stub(ModuleType):
    """``triton_python_backend_utils`` as far as such a call goes; it holds each answer until ``cleanup``."""

    def __init__(self) -> None:
        super().__init__("triton_python_backend_utils")
        self.held: list[Answer] = []

    def Tensor(self, name: str, array: np.ndarray) -> Any:
        return name, array

    def InferenceRequest(self, **call: Any) -> Any:
        def exec(decoupled: bool) -> Iterator[Answer]:
            assert decoupled
            self.held.append(Answer())
            yield self.held[-1]

        return SimpleNamespace(exec=exec)

    def get_output_tensor_by_name(self, answer: Answer, name: str) -> Any:
        return SimpleNamespace(as_numpy=lambda: np.array([[2]], np.int32))

    def cleanup(self) -> None:
        thread = threading.Thread(target=self.held.clear, name="stub_to_parent")
        thread.start()
        thread.join()


@pytest.fixture
def stub(triton_api: Callable[[ModuleType], None]) -> Stub:
    stub = Stub()
    triton_api(stub)
    return stub


def test_the_stubs_thread_frees_no_answer(stub: Stub) -> None:
    from inflight.triton import adapter

    FREED_IN.clear()
    for _ in range(300):
        assert adapter.announce(b"one") == 2
        stub.cleanup()
    assert len(FREED_IN) == 300 - 256, "they are not kept for ever"
    assert set(FREED_IN) == {threading.current_thread().name}
