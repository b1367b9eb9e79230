"""/v1/responses: OpenAI's Responses API, without anything stored: a chat, answered with items and typed events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from json import JSONEncoder

from starlette.requests import Request
from starlette.responses import Response

from inflight.gateway.as_chat import deltas_of, fields_of, job_of
from inflight.gateway.chat_guides import can_enforce
from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.errors import ApiError
from inflight.gateway.fields import Fields
from inflight.gateway.generation import ChoiceDelta, Job
from inflight.gateway.log_probs import TokenNames, chat_entry
from inflight.gateway.preparing import prepared
from inflight.gateway.reasoning_tokens import ReasoningTokens
from inflight.gateway.responses.events import ResponseUsage, ResponseWriter
from inflight.gateway.responses.items import Json
from inflight.gateway.responses.log_probs import TextLogProbs
from inflight.gateway.responses.request import ResponsesRequest, read_request
from inflight.gateway.sse import EventStream, event, while_connected
from inflight.gateway.turns import TurnRules
from inflight.gateway.workers import off_loop, written
from inflight.text.output.events import ContentDelta


async def create_response(request: Request) -> Response:
    """Answer a request for a response. Raises ApiError: before anything is sent."""
    gateway = gateway_of(request)
    asked, fields, job, answer = await prepared(request, _prepare)
    gateway.metrics.ignored_fields(fields.ignored)
    deltas = deltas_of(request, gateway, job, asked.names)
    headers = fields.headers()
    if asked.stream:
        return EventStream(request, answer.stream(deltas), last=b"", on_error=answer.failed, headers=headers)
    body = await while_connected(request, answer.whole(deltas))
    return Response(body, media_type="application/json", headers=headers)


def _prepare(request: Request, gateway: Gateway, body: Json) -> tuple[ResponsesRequest, Fields, Job, _Answer]:
    rules = TurnRules.of(gateway.chat_template)
    enforces = partial(can_enforce, gateway.chat_format, gateway.deployment.most_guide_bytes)
    asked = read_request(body, strict=gateway.settings.strict_fields, rules=rules, enforces=enforces)
    fields = fields_of(gateway, asked.chat, asked.names, asked.ignored)
    job = job_of(request, gateway, fields, asked.names, stream=asked.stream)
    guide_param = asked.names.path(job.guide_param)
    job = replace(job, prompt_param="input", guide_param=guide_param, by_token=asked.log_probs)
    return asked, fields, job, _Answer(asked, gateway, fields, job)


class _Answer:
    """The answer to one request."""

    def __init__(self, asked: ResponsesRequest, gateway: Gateway, fields: Fields, job: Job) -> None:
        sampling = {"temperature": job.request.temperature, "top_p": job.request.top_p}
        shown, seals = asked.repeated(fields) | sampling, asked.seals_reasoning
        self._writer = ResponseWriter(shown, fields["model"], asked.called, seals_reasoning=seals)
        self._entry = partial(chat_entry, names=TokenNames(gateway.tokenizer))
        self._delta = JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=self._entry)
        self._reasoning = ReasoningTokens(job, gateway.tokenizer)
        self._log_probs = TextLogProbs()
        self._pieces = 0
        """How much the response has: its tokens, with what log-probs are written with."""
        self._pieces_each = 8 * (1 + job.request.top_log_probs)

    async def stream(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncIterator[bytes]:
        """Yield the events as they are sent."""
        async with aclosing(self._events(deltas)) as events:
            async for one in events:
                if one["type"].endswith(".delta"):
                    yield event(self._delta.encode(one), one["type"])
                else:
                    yield await off_loop(partial(self._encoded, one), self._pieces)

    async def whole(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> str:
        """Return the response of the last event, as JSON."""
        response: Json = {}
        async with aclosing(self._events(deltas)) as events:
            async for one in events:
                response = one.get("response", response)
        return await off_loop(partial(self._written, response), self._pieces)

    def failed(self, error: ApiError) -> bytes:
        """Return the events with which a stream fails."""
        return b"".join(map(self._encoded, self._writer.fail(error)))

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
        self._pieces += len(delta.token_ids) * self._pieces_each
        self._reasoning.add(delta)
        self._log_probs.add(delta.log_probs)
        events: list[Json] = []
        for output in delta.events:
            if isinstance(output, ContentDelta):
                events += self._writer.add(output, self._log_probs.take(output.text))
            else:
                self._log_probs.leave()
                events += self._writer.add(output)
        if rest := self._log_probs.rest():
            events += self._writer.add_log_probs(rest)
        if delta.finish_reason:
            usage = delta.usage
            counts = ResponseUsage(
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.written_tokens,
                usage.completion_tokens,
                self._reasoning.count,
            )
            events += self._writer.finish(cut=delta.finish_reason == "length", usage=counts)
        return events

    def _encoded(self, one: Json) -> bytes:
        return event(self._written(one), one["type"])

    def _written(self, value: Json) -> str:
        return written(value, self._entry)
