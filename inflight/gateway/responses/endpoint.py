"""/v1/responses: OpenAI's Responses API, without anything stored: a chat, answered with items and typed events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from inflight.gateway.as_chat import deltas_of, job_of
from inflight.gateway.body import read_object
from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.errors import ApiError
from inflight.gateway.fields import Fields
from inflight.gateway.generation import ChoiceDelta, Job
from inflight.gateway.log_probs import TokenLogProb, TokenNames, chat_log_probs
from inflight.gateway.reasoning_tokens import ReasoningTokens
from inflight.gateway.responses.events import ResponseUsage, ResponseWriter
from inflight.gateway.responses.items import Json
from inflight.gateway.responses.log_probs import TextLogProbs
from inflight.gateway.responses.request import ResponsesRequest, read_request
from inflight.gateway.sampling import off_loop
from inflight.gateway.sse import EventStream, event, while_connected
from inflight.text.output.events import ContentDelta


async def create_response(request: Request) -> Response:
    """Answer a request for a response. Raises ApiError: before anything is sent."""
    gateway = gateway_of(request)
    body, strict = await read_object(request), gateway.settings.strict_fields
    asked = await off_loop(lambda: read_request(body, strict=strict), len(await request.body()))
    gateway.metrics.ignored_fields(asked.ignored)
    model = gateway.check_model(asked.chat["model"])
    job = await job_of(request, gateway, asked.chat, asked.names, stream=asked.stream)
    guide_param = asked.names.path(job.guide_param)
    job = replace(job, prompt_param="input", guide_param=guide_param, by_token=asked.log_probs)
    answer = _Answer(asked, gateway, model, job)
    deltas = deltas_of(request, gateway, job, asked.names)
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
        self._log_probs = TextLogProbs()

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

    def _add(self, delta: ChoiceDelta) -> list[Json]:
        self._reasoning.add(delta)
        self._log_probs.add(delta.log_probs)
        events: list[Json] = []
        for output in delta.events:
            if isinstance(output, ContentDelta):
                events += self._writer.add(output, self._scores(self._log_probs.take(output.text)))
            else:
                self._log_probs.leave()
                events += self._writer.add(output)
        if rest := self._log_probs.rest():
            events += self._writer.add_log_probs(self._scores(rest))
        if delta.finish_reason:
            usage = delta.usage
            counts = ResponseUsage(
                usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, self._reasoning.count
            )
            events += self._writer.finish(cut=delta.finish_reason == "length", usage=counts)
        return events

    def _scores(self, entries: Sequence[TokenLogProb]) -> list[Json]:
        return list(chat_log_probs(entries, self._names)["content"])


def _encoded(one: Json) -> bytes:
    return event(json.dumps(one), one["type"])
