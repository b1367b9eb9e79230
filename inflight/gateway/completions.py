"""/v1/completions: prompts, as texts or token ids, to texts; streamed or whole, both from the same streams."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight.gateway.body import read_object
from inflight.gateway.completion_choice import CompletionChoice
from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.counting import counted
from inflight.gateway.errors import invalid
from inflight.gateway.field_tables import COMPLETION_READER
from inflight.gateway.fields import Fields
from inflight.gateway.generation import ChoiceDelta, Job, Usage
from inflight.gateway.guides import read_guide
from inflight.gateway.merging import AT_ONCE, merged
from inflight.gateway.prompt_log_probs import asked_prompt_log_probs
from inflight.gateway.prompts import Prompt, read_prompts
from inflight.gateway.sampling import generate_request, wants_stream
from inflight.gateway.sse import EventStream, event, while_connected
from inflight.gateway.usage import StreamedCounts, usage_object
from inflight.text.output.format import ChatFormat

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def completions(request: Request) -> Response:
    """Complete prompts. Raises ApiError: before anything is sent."""
    gateway = gateway_of(request)
    fields = COMPLETION_READER.read(await read_object(request), strict=gateway.settings.strict_fields)
    gateway.metrics.ignored_fields(fields.ignored)
    model = gateway.check_model(fields["model"])
    streams = wants_stream(fields)
    special = fields.get("add_special_tokens", True)
    prompts = await read_prompts(fields["prompt"], gateway, add_special_tokens=special)
    jobs = [_job(request, fields, gateway, prompt, stream=streams) for prompt in prompts]
    answer = CompletionAnswer(fields, gateway, model, jobs, prompts)
    deltas = merged([counted(request, gateway, job) for job in jobs], AT_ONCE)
    if streams:
        return EventStream(request, answer.events(deltas), headers=fields.headers())
    body = await while_connected(request, answer.whole(deltas))
    return Response(_json(body), media_type="application/json", headers=fields.headers())


def _job(request: Request, fields: Fields, gateway: Gateway, prompt: Prompt, *, stream: bool) -> Job:
    count, best_of = fields.get("n", 1), fields.get("best_of")
    if best_of not in (None, count):
        raise invalid(f"best_of is {best_of} and n is {count}; they must be equal", "best_of")
    echo, top, most = fields.get("echo", False), fields.get("logprobs"), fields.get("max_tokens", DEFAULT_MAX_TOKENS)
    if most == 0 and not echo:
        raise invalid("max_tokens is 0; without echo it must be at least 1", "max_tokens")
    scored = [count for count in (asked_prompt_log_probs(fields, gateway), top if echo else None) if count is not None]
    guide = read_guide(fields)
    engine_request = generate_request(
        request,
        fields,
        gateway,
        prompt.ids,
        "prompt",
        max_tokens=max(1, most),
        stream=stream,
        guide=guide and guide.guide,
        log_probs=top is not None,
        top_log_probs=top or 0,
        prompt_log_probs=max(scored, default=None),
    )
    if echo and top is not None and not engine_request.min_tokens:
        # lm-eval takes the last token of the answer for the generated one, and an end id must be there to be taken.
        ends = engine_request.end_ids
        engine_request = replace(engine_request, end_ids=(), stop_token_ids=ends)
    return Job(
        engine_request,
        ChatFormat(gateway.tokenizer),
        show_special=not fields.get("skip_special_tokens", True),
        show_stop=fields.get("include_stop_str_in_output", False),
        guide_param=guide.param if guide else "",
    )


class CompletionAnswer:
    """Writes the answer to one request."""

    def __init__(
        self, fields: Fields, gateway: Gateway, model: str, jobs: Sequence[Job], prompts: Sequence[Prompt]
    ) -> None:
        given = fields.get("request_id", fields.get("rid"))
        self._head = {
            "id": f"cmpl-{given or secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._counts = StreamedCounts.asked(fields)
        self._count = fields.get("n", 1)
        self._usages = [Usage(len(job.request.prompt), 0) for job in jobs]
        self._nothing = fields.get("max_tokens") == 0
        self._choices = [
            CompletionChoice(fields, gateway.tokenizer, job, prompt, number * self._count + index)
            for number, (job, prompt) in enumerate(zip(jobs, prompts, strict=True))
            for index in range(self._count)
        ]

    async def whole(self, deltas: AsyncGenerator[tuple[int, ChoiceDelta], None]) -> dict[str, Any]:
        """Return the whole answer."""
        async with aclosing(deltas):
            async for number, delta in deltas:
                self._take(number, delta)
        choices = [choice.take() for choice in self._choices]
        return {**self._head, "choices": choices, "usage": usage_object(self._usage())}

    async def events(self, deltas: AsyncGenerator[tuple[int, ChoiceDelta], None]) -> AsyncIterator[bytes]:
        """Yield the chunks of a streamed answer."""
        async with aclosing(deltas):
            async for number, delta in deltas:
                choice = self._take(number, delta)
                if choice.has_news:
                    more = {"usage": usage_object(self._usage())} if self._counts.in_each else {}
                    yield event(_json({**self._head, "choices": [choice.take()], **more}))
        if self._counts.at_the_end:
            yield event(_json({**self._head, "choices": [], "usage": usage_object(self._usage())}))

    def _take(self, number: int, delta: ChoiceDelta) -> CompletionChoice:
        usage = delta.usage
        self._usages[number] = replace(usage, completion_tokens=0) if self._nothing else usage
        choice = self._choices[number * self._count + delta.index]
        choice.add(delta)
        return choice

    def _usage(self) -> Usage:
        prompt, completion, cached = (
            sum(getattr(usage, name) for usage in self._usages)
            for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
        )
        return Usage(prompt, completion, cached)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
