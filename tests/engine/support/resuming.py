"""Runs a request whole, and again as a client that is cut off and resumes; both as the detokenizer's client sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from inflight.engine.engine import Engine
from inflight.engine.request import FinishReason, Output, Request, new_stream_key
from inflight.text.postprocess import Postprocessor
from inflight.text.tokenizer import Tokenizer
from inflight.triton import response_writer
from inflight.triton.request_reader import OutputOptions, SubRequest

OPTIONS = OutputOptions(
    streaming=True, exclude_input_in_output=False, heartbeat=True, return_log_probs=True, return_perf_metrics=False,
    final_perf_metrics=False, return_num_input_tokens=False, return_num_output_tokens=True, pad_id=0, vocab_size=0,
    batch_size=1, sequences=1, return_token_ids=True,
)  # fmt: skip


@dataclass(frozen=True)
class Chunk:
    """What a client has after a response."""

    tokens: int
    """So far."""
    text: str
    """Of this response."""
    start: int
    end: int


@dataclass
class Answer:
    """What a client got of a request."""

    tokens: list[int]
    log_probs: list[float]
    chunks: list[Chunk]
    finish_reason: FinishReason | None
    error: str | None
    seed: int | None

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


def outputs_of(engine: Engine, request: Request, beside: Callable[[], list[Request]] = list) -> Iterator[Output]:
    """Serve a request, with others beside it; yield its outputs."""
    for one in [*beside(), request]:
        engine.validate(one)
        engine.submit(one)
    while engine.busy:
        yield from (output for output in engine.step() if output.key == request.key)


def answer(
    tokenizer: Tokenizer, request: Request, outputs: Iterator[Output], joined: Callable[[], int] = lambda: 1
) -> Answer:
    """Return what the client gets of these outputs; ``joined()`` of them go into each response."""
    postprocessor, subrequest = Postprocessor(tokenizer), SubRequest(request, 0, 0)
    made = Answer([], [], [], None, None, None)
    count, pending, first = joined(), Output(request.key), True
    for output in outputs:
        pending.extend(output)
        count -= 1
        if count > 0 and not output.finished:
            continue
        if pending.error is not None:
            made.error = pending.error.wire_message()
            break
        made.tokens += pending.tokens
        made.log_probs += pending.log_probs or []
        arrays = response_writer.to_arrays(pending, subrequest, OPTIONS, len(made.tokens), 0.0)
        if first:
            opening = response_writer.opening(request, OPTIONS)
            made.seed = int(opening["used_seed"].item()) if "used_seed" in opening else None
            arrays |= opening
        told = postprocessor.postprocess(arrays)
        assert told is not None
        assert told["token_ids"].reshape(-1).tolist() == pending.tokens
        text, start, end = (told[name].item() for name in ("text_output", "text_start", "text_end"))
        made.chunks.append(Chunk(len(made.tokens), text.decode(), start, end))
        made.finish_reason = pending.finish_reason
        count, pending, first = joined(), Output(request.key), False
    return made


def again(request: Request, tokens: list[int], log_probs: list[float], seed: int | None) -> Request:
    """Return the request as its client resumes it."""
    told = np.array(log_probs, np.float32).tolist()
    settings: dict[str, Any] = {"resumed_ids": list(tokens), "resumed_log_prob": sum(told), "key": new_stream_key()}
    sampling = request.sampling if seed is None else replace(request.sampling, seed=seed)
    return replace(request, sampling=sampling, arrival_ns=0, seed=None, resumed_text_limit=None, **settings)
