"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, a chat answered with blocks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.gateway.as_chat import deltas_of, fields_of, job_of, prompt_tokens_of
from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.errors import ApiError, invalid
from inflight.gateway.fields import Fields
from inflight.gateway.generation import ChoiceDelta, Job
from inflight.gateway.messages.errors import message_error
from inflight.gateway.messages.events import Json, MessageUsage, MessageWriter
from inflight.gateway.messages.request import MessagesRequest, read_count_request, read_message_request
from inflight.gateway.preparing import prepared
from inflight.gateway.reasoning_tokens import ReasoningTokens
from inflight.gateway.requests import state_of
from inflight.gateway.sampling import prompt_room
from inflight.gateway.sse import EventStream, event, while_connected
from inflight.gateway.turns import TurnRules
from inflight.gateway.values import same


async def create_message(request: Request) -> Response:
    """Answer a request for a message. Raises ApiError: before anything is sent."""
    gateway = gateway_of(request)
    asked, fields, job = await prepared(request, _prepare)
    gateway.metrics.ignored_fields(fields.ignored)
    request_id = state_of(request).request_id
    answer = _Answer(asked, gateway, fields["model"], job, request_id)
    deltas = deltas_of(request, gateway, job, asked.names)
    headers = {"request-id": request_id, **fields.headers()}
    if asked.stream:
        return EventStream(request, answer.stream(deltas), last=b"", on_error=answer.failed, headers=headers)
    message = await while_connected(request, answer.whole(deltas))
    return Response(json.dumps(message), media_type="application/json", headers=headers)


def _prepare(request: Request, gateway: Gateway, body: dict[str, Any]) -> tuple[MessagesRequest, Fields, Job]:
    rules = TurnRules.of(gateway.chat_template)
    asked = read_message_request(body, strict=gateway.settings.strict_fields, rules=rules)
    if asked.chat.get("truncate_prompt_tokens") == -1:
        asked.chat["truncate_prompt_tokens"] = prompt_room(gateway, asked.max_tokens)
    fields = _chat_fields(gateway, asked)
    job = job_of(request, gateway, fields, asked.names, stream=asked.stream)
    room = job.request.max_tokens if gateway.max_model_len is not None else asked.max_tokens
    engine_request = replace(job.request, max_tokens=min(asked.max_tokens, room))
    return asked, fields, replace(job, request=engine_request, guide_param=asked.names.path(job.guide_param))


async def count_tokens(request: Request) -> Response:
    """Answer with the number of tokens of the prompt that a request for a message would have."""
    gateway = gateway_of(request)
    fields, count = await prepared(request, _count)
    gateway.metrics.ignored_fields(fields.ignored)
    headers = {"request-id": state_of(request).request_id, **fields.headers()}
    return JSONResponse({"input_tokens": count}, headers=headers)


def _count(_: Request, gateway: Gateway, body: dict[str, Any]) -> tuple[Fields, int]:
    rules = TurnRules.of(gateway.chat_template)
    asked = read_count_request(body, strict=gateway.settings.strict_fields, rules=rules)
    fields = _chat_fields(gateway, asked)
    return fields, prompt_tokens_of(gateway, fields, asked.names)


def _chat_fields(gateway: Gateway, asked: MessagesRequest) -> Fields:
    """Return the fields of the chat, with thinking switched on or off where the template can."""
    template, unmet = gateway.template_of(asked.chat), []
    if asked.thinks is not None and template is not None and template.uses("enable_thinking"):
        options = {"enable_thinking": asked.thinks, **asked.chat.get("chat_template_kwargs", {})}
        if not same(options["enable_thinking"], asked.thinks):
            path = "chat_template_kwargs.enable_thinking"
            raise invalid(f"{path} and thinking.type contradict each other; give one of them", path)
        asked.chat["chat_template_kwargs"] = options
    elif asked.thinks is False and gateway.chat_format.has_reasoning:
        unmet = ["thinking.type"]  # this model cannot be kept from thinking
    fields = fields_of(gateway, asked.chat, asked.names, asked.ignored)
    return fields.naming(unmet, strict=gateway.settings.strict_fields)


class _Answer:
    """The answer to one request."""

    def __init__(self, asked: MessagesRequest, gateway: Gateway, model: str, job: Job, request_id: str) -> None:
        self._writer = MessageWriter(model, omits_thinking=asked.omits_thinking)
        self._thinking = ReasoningTokens(job, gateway.tokenizer)
        self._cut_by_context = job.request.max_tokens < asked.max_tokens
        self._request_id = request_id
        self._message: Json = {}

    async def stream(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncIterator[bytes]:
        """Yield the events as they are sent."""
        async with aclosing(self._events(deltas)) as events:
            async for one in events:
                yield event(json.dumps(one), one["type"])

    async def whole(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> Json:
        """Return the message that the events add up to."""
        async with aclosing(self._events(deltas)) as events:
            async for _ in events:
                pass
        return self._message

    def failed(self, error: ApiError) -> bytes:
        """Return the event with which a stream fails."""
        return event(json.dumps(message_error(error, self._request_id)), "error")

    async def _events(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[Json, None]:
        """Yield the events; the first ones come with the engine's first answer."""
        begun = False
        async with aclosing(deltas):
            async for delta in deltas:
                self._thinking.add(delta)
                if not begun:
                    begun = True
                    usage = self._usage(delta)
                    usage = replace(usage, written=usage.written or 0, output=0, thinking=0)
                    for one in self._writer.begin(usage):
                        yield one
                for output in delta.events:
                    for one in self._writer.add(output):
                        yield one
                if delta.finish_reason:
                    events, self._message = self._writer.finish(*self._end(delta), self._usage(delta))
                    for one in events:
                        yield one

    def _end(self, delta: ChoiceDelta) -> tuple[str, str | None]:
        """Return why the message ends, and the stop sequence that ended it."""
        if delta.finish_reason == "length":
            by_context = self._cut_by_context and delta.stop_reason is None
            return ("model_context_window_exceeded" if by_context else "max_tokens"), None
        if self._writer.calls and not delta.cut_call:
            return "tool_use", None
        return ("stop_sequence", delta.stop_reason) if delta.stop_reason else ("end_turn", None)

    def _usage(self, delta: ChoiceDelta) -> MessageUsage:
        usage = delta.usage
        return MessageUsage(
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.written_tokens,
            usage.completion_tokens,
            self._thinking.count,
        )
