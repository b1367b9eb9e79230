"""What stands in for Triton's sender of responses."""

from __future__ import annotations

import threading
import time

import numpy as np

from inflight.engine.request import Output
from inflight.errors import InflightError
from inflight.triton.request_reader import SubRequest
from inflight.triton.response_writer import Arrays


class FakeSender:
    """Remembers what is sent; refuses what Triton would refuse."""

    def __init__(self, *, cancelled: bool = False, broken: bool = False) -> None:
        self.cancelled, self.broken = cancelled, broken
        self.sent: list[tuple[float, Arrays]] = []
        self.error: Exception | None = None
        self.failed_key: int | None = None
        self.ended = threading.Event()

    def send(self, arrays: Arrays, final: bool) -> None:
        assert not self.ended.is_set(), "a response after the last one"
        assert all(isinstance(array, np.ndarray) for array in arrays.values())
        if self.broken:
            raise RuntimeError("the sender is broken")
        self.sent.append((time.monotonic(), arrays))
        if final:
            self.ended.set()

    def fail(self, error: InflightError, stream_key: int | None = None) -> None:
        assert not self.ended.is_set(), "an error after the last response"
        self.error, self.failed_key = error, stream_key
        self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def sequence_ended(self, subrequest: SubRequest, output: Output) -> None:
        pass

    @property
    def tokens(self) -> list[int]:
        return [token for _, arrays in self.sent for token in arrays["output_ids"].reshape(-1).tolist()]
