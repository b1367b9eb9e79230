"""/v1/responses: OpenAI's Responses API, without anything stored: a chat, answered with items and typed events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight.gateway.as_chat import FieldNames, deltas_of, job_of
from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.errors import ApiError
from inflight.gateway.fields import Fields
from inflight.gateway.generation import ChoiceDelta, Job
from inflight.gateway.log_probs import TokenNames, chat_log_probs
from inflight.gateway.preparing import prepared
from inflight.gateway.reasoning_tokens import ReasoningTokens
from inflight.gateway.responses.events import ResponseWriter, Usage
from inflight.gateway.responses.items import Json
from inflight.gateway.responses.log_probs import TextLogProbs
from inflight.gateway.responses.request import RENAMED, ResponsesRequest, read_request
from inflight.gateway.sse import EventStream, event, while_connected
from inflight.text.output.events import ContentDelta

_NAMES = FieldNames(RENAMED)


async def create_response(request: Request) -> Response:
    """Answer a request for a response. Raises ApiError: before anything is sent."""
    gateway = gateway_of(request)

    def prepare(body: Json) -> tuple[ResponsesRequest, Job, _Answer]:
        asked = read_request(body, strict=gateway.settings.strict_fields)
        model = gateway.check_model(asked.chat["model"])
        job = job_of(request, gateway, asked.chat, _NAMES, stream=asked.stream)
        job = replace(job, prompt_param="input", guide_param=_NAMES.path(job.guide_param))
        return asked, job, _Answer(asked, gateway, model, job)

    asked, job, answer = await prepared(request, prepare)
    gateway.metrics.ignored_fields(asked.ignored)
    deltas = deltas_of(request, gateway, job, _NAMES)
    headers = Fields({}, asked.ignored).headers()
    if asked.stream:
        return EventStream(request, answer.stream(deltas), last=b"", on_error=answer.failed, headers=headers)
    body = await while_connected(request, answer.whole(deltas))
    return Response(json.dumps(body), media_type="application/json", headers=headers)


class _Answer:
    """The answer to one request."""

    def __init__(self, asked: ResponsesRequest, gateway: Gateway, model: str, job: Job) -> None:
        sampling = {"temperature": job.request.temperature, "top_p": job.request.top_p}
        self._writer = ResponseWriter(asked.shown | sampling, model, seals_reasoning=asked.seals_reasoning)
        self._names = TokenNames(gateway.tokenizer)
        self._reasoning = ReasoningTokens(job, gateway.tokenizer)
        self._log_probs = TextLogProbs() if asked.log_probs else None

    async def stream(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncIterator[bytes]:
        """Yield the events as they are sent."""
        async with aclosing(self._events(deltas)) as events:
            async for one in events:
                yield _encoded(one)

    async def whole(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> Json:
        """Return the response of the last event."""
        response: Json = {}
        async with aclosing(self._events(deltas)) as events:
            async for one in events:
                response = one.get("response", response)
        return response

    def failed(self, error: ApiError) -> bytes:
        """Return the events with which a stream fails."""
        return b"".join(map(_encoded, self._writer.fail(error)))

    async def _events(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[Json, None]:
        """Yield the events; the first ones come with the engine's first answer."""
        begun = False
        async with aclosing(deltas):
            async for delta in deltas:
                if not begun:
                    begun = True
                    for one in self._writer.begin():
                        yield one
                for one in self._add(delta):
                    yield one

    def _scores(self, text: str) -> list[dict[str, Any]]:
        """Return the log-probs that go with the next piece of text."""
        if self._log_probs is None:
            return []
        before = 0 if self._log_probs.begun else self._reasoning.count
        return list(chat_log_probs(self._log_probs.take(text, before), self._names)["content"])

    def _add(self, delta: ChoiceDelta) -> list[Json]:
        self._reasoning.add(delta)
        if self._log_probs is not None:
            self._log_probs.add(delta.log_probs)
        events: list[Json] = []
        for output in delta.events:
            scores: list[dict[str, Any]] = []
            if isinstance(output, ContentDelta):
                scores = self._scores(output.text)
            events += self._writer.add(output, scores)
        if delta.finish_reason:
            usage = delta.usage
            counts = Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, self._reasoning.count)
            reason = "deadline" if delta.stop_reason == "deadline" else delta.finish_reason
            events += self._writer.finish(reason, counts)
        return events


def _encoded(one: Json) -> bytes:
    return event(json.dumps(one), one["type"])
