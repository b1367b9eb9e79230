"""What is still to come of a request whose stream broke: the requests that ask for it, and their answers as one.

A sequence goes on behind the tokens that have come of it (``resumed_ids``), and is sampled by the seed that its first
chunk told. Knows nothing of transports, and of when to try again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from inflight.client.answer import Chunk, Collector, Completion
from inflight.client.request import Request
from inflight.errors import DeadlineExceeded, InflightError
from inflight.sampling import MAX_SEED

_IDS = "return_token_ids"


class Resumption:
    """One request, as it is sent first and after each break."""

    def __init__(self, request: Request, collector: Collector, resume: bool) -> None:
        """
        Args:
            request: as it was made; with ``resume`` it asks for token ids too, where its answer can be resumed.
            collector: it is given each chunk before the next one is asked for.
            resume: whether a stream that broke goes on.
        """
        self._collector, self._resume = collector, resume
        self.breaks, self._heard = 0, 0
        """How often it has gone on, and how many chunks had come when it was sent last."""
        inputs = request.inputs
        asks = resume and inputs["stream"][0] and "pooling" not in inputs and inputs.get("beam_width", [1])[0] <= 1
        self._given = request
        self._request = replace(request, inputs=inputs | {_IDS: [True]}) if asks else request
        deadline = inputs.get("deadline_ms") if resume else None
        self._deadline = None if deadline is None else time.monotonic() + deadline[0] / 1000

    @property
    def done(self) -> bool:
        """Whether all has come, so that it does not matter how the stream ends."""
        return self._resume and self._collector.complete

    @property
    def can_go_on(self) -> bool:
        """Whether the rest can be asked for: nothing has come, or it is known which tokens."""
        if not self._collector.begun:
            return True
        return all(one.token_ids or not one.outputs for one in self._collector.unfinished().values())

    def requests(self) -> list[Request]:
        """Return the requests for what has not come: the request itself, or one for each sequence that has not ended.

        Raises:
            DeadlineExceeded: the request's ``deadline_ms``, which counts from its first try, has passed.
        """
        request = self._request
        if self._deadline is not None:
            left_ms = int((self._deadline - time.monotonic()) * 1000)
            if left_ms < 1:
                raise DeadlineExceeded("deadline_ms passed while the server was away")
            request = replace(request, inputs=request.inputs | {"deadline_ms": [left_ms]})
        if not self._collector.begun:
            return [request]
        self.breaks += self._collector.chunks > self._heard
        self._heard = self._collector.chunks
        return [_rest(request, index, so_far) for index, so_far in self._collector.unfinished().items()]

    def within_deadline(self, pause: float) -> float:
        """Return the pause, or what is left of the deadline where that is less."""
        return pause if self._deadline is None else max(0.0, min(pause, self._deadline - time.monotonic()))

    def goes_without_ids(self, refusal: InflightError) -> bool:
        """Return whether the server refuses to tell token ids that only resuming needs, so that the request is to be
        sent as it was made; it is then not resumed."""
        if _IDS not in str(refusal) or self._collector.begun or self._request == self._given:
            return False
        self._request = self._given
        return True

    def ended_by_deadline(self) -> list[Chunk]:
        """Return the last chunk of each sequence that the deadline ends. There is none where one of them has no token:
        the request then ends with an error, as the server ends it."""
        rest = self._collector.unfinished()
        ends = self._deadline is not None and all(so_far.outputs for so_far in rest.values())
        return [Chunk("", index, "deadline") for index in rest] if ends else []


def _rest(request: Request, index: int, so_far: Completion) -> Request:
    """Return the request for the rest of one sequence, of which ``so_far`` has come."""
    inputs: dict[str, list[Any]] = dict(request.inputs)
    inputs.pop("num_return_sequences", None)
    if so_far.used_seed is not None:
        inputs["seed"] = [so_far.used_seed]
    elif "seed" in inputs:
        inputs["seed"] = [(inputs["seed"][0] + index) % (MAX_SEED + 1)]  # as the server counts them
    if so_far.token_ids:
        inputs["resumed_ids"] = [*inputs.get("resumed_ids", ()), *so_far.token_ids]
        if inputs.get("return_log_probs", [False])[0]:
            inputs["resumed_log_probs"] = [*inputs.get("resumed_log_probs", ()), *so_far.log_probs]
    if so_far.token_ids or index:  # the log-probs of the prompt come with the first token of the first sequence
        inputs.pop("num_prompt_log_probs", None)
    return replace(request, inputs=inputs, index=index)


async def merged(streams: Sequence[AsyncGenerator[Chunk, None]]) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of several streams as they come; the first error of one ends them all."""
    waiting = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                stream = waiting.pop(task)
                if (chunk := task.result()) is not None:
                    waiting[asyncio.ensure_future(anext(stream, None))] = stream
                    yield chunk
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
