"""/v1/completions: prompts, as texts or token ids, to texts; streamed or whole, both from the same streams."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight.gateway.completion_choice import CompletionChoice
from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.counting import counted_all
from inflight.gateway.errors import invalid
from inflight.gateway.field_tables import COMPLETION_READER
from inflight.gateway.fields import Fields
from inflight.gateway.generation import ChoiceDelta, Job, Usage
from inflight.gateway.guides import FieldGuide, read_guide
from inflight.gateway.preparing import prepared
from inflight.gateway.prompt_log_probs import asked_prompt_log_probs
from inflight.gateway.prompts import MOST_PROMPTS, Prompt, read_prompts
from inflight.gateway.sampling import generate_request, most_tokens, sampling_arguments, wants_stream
from inflight.gateway.sse import EventStream, event, while_connected
from inflight.gateway.usage import StreamedCounts, usage_object
from inflight.gateway.workers import off_loop, written
from inflight.text.output.format import ChatFormat

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def completions(request: Request) -> Response:
    """Complete prompts. Raises ApiError: before anything is sent."""
    gateway = gateway_of(request)
    fields, jobs, answer = await prepared(request, _prepare)
    gateway.metrics.ignored_fields(fields.ignored)
    deltas = counted_all(request, gateway, jobs)
    if wants_stream(fields):
        return EventStream(request, answer.events(deltas), headers=fields.headers())
    body = await while_connected(request, answer.whole(deltas))
    return Response(body, media_type="application/json", headers=fields.headers())


def _prepare(request: Request, gateway: Gateway, body: dict[str, Any]) -> tuple[Fields, list[Job], CompletionAnswer]:
    fields = gateway.read(COMPLETION_READER, body)
    streams = wants_stream(fields)
    special = fields.get("add_special_tokens", True)
    prompts = read_prompts(fields["prompt"], gateway, add_special_tokens=special, tokens=most_tokens(gateway, fields))
    if len(prompts) * fields.get("n", 1) > MOST_PROMPTS:
        message = f"prompt has {len(prompts)} prompts and n is {fields['n']}; the limit is {MOST_PROMPTS} choices"
        raise invalid(message, "n")
    guide = read_guide(fields, gateway.deployment.most_guide_bytes)
    arguments = sampling_arguments(fields, gateway) | {"stream": streams}
    jobs = [_job(request, fields, gateway, prompt, guide, arguments) for prompt in prompts]
    return fields, jobs, CompletionAnswer(fields, gateway, jobs, prompts)


def _job(
    request: Request,
    fields: Fields,
    gateway: Gateway,
    prompt: Prompt,
    guide: FieldGuide | None,
    arguments: Mapping[str, Any],
) -> Job:
    """Return the job of one prompt; guide and arguments are those of all."""
    count, best_of = fields.get("n", 1), fields.get("best_of")
    if best_of not in (None, count):
        raise invalid(f"best_of is {best_of} and n is {count}; they must be equal", "best_of")
    echo, top, most = fields.get("echo", False), fields.get("logprobs"), fields.get("max_tokens", DEFAULT_MAX_TOKENS)
    if most == 0 and not echo:
        raise invalid("max_tokens is 0; without echo it must be at least 1", "max_tokens")
    scored = [count for count in (asked_prompt_log_probs(fields, gateway), top if echo else None) if count is not None]
    engine_request = generate_request(
        request,
        fields,
        gateway,
        prompt.ids,
        prompt.param,
        **arguments,
        max_tokens=max(1, most),
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
        prompt_param=prompt.param,
        guide_param=guide.param if guide else "",
    )


class CompletionAnswer:
    """Writes the answer to one request."""

    def __init__(self, fields: Fields, gateway: Gateway, jobs: Sequence[Job], prompts: Sequence[Prompt]) -> None:
        given = fields.either("request_id", "rid")
        self._head = {
            "id": f"cmpl-{given or secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": fields["model"],
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

    async def whole(self, deltas: AsyncGenerator[tuple[int, ChoiceDelta], None]) -> str:
        """Return the whole answer, as JSON."""
        async with aclosing(deltas):
            async for number, delta in deltas:
                await self._take(number, delta)
        return await off_loop(self._written, sum(choice.pieces for choice in self._choices))

    def _written(self) -> str:
        choices = ",".join(written(choice.take()) for choice in self._choices)
        usage = _json(usage_object(self._usage()))
        return f'{_json(self._head)[:-1]},"choices":[{choices}],"usage":{usage}}}'

    async def events(self, deltas: AsyncGenerator[tuple[int, ChoiceDelta], None]) -> AsyncIterator[bytes]:
        """Yield the chunks of a streamed answer."""
        async with aclosing(deltas):
            async for number, delta in deltas:
                choice = await self._take(number, delta)
                if choice.has_news:
                    more = {"usage": usage_object(self._usage())} if self._counts.in_each else {}
                    yield await off_loop(partial(self._chunk, choice, more), choice.pieces)
        if self._counts.at_the_end:
            yield event(_json({**self._head, "choices": [], "usage": usage_object(self._usage())}))

    def _chunk(self, choice: CompletionChoice, more: dict[str, Any]) -> bytes:
        rest = f",{_json(more)[1:]}" if more else "}"
        return event(f'{_json(self._head)[:-1]},"choices":[{written(choice.take())}]{rest}')

    async def _take(self, number: int, delta: ChoiceDelta) -> CompletionChoice:
        usage = delta.usage
        self._usages[number] = replace(usage, completion_tokens=0) if self._nothing else usage
        choice = self._choices[number * self._count + delta.index]
        await off_loop(lambda: choice.add(delta), choice.pieces_of(delta))
        return choice

    def _usage(self) -> Usage:
        prompt, completion, cached = (
            sum(getattr(usage, name) for usage in self._usages)
            for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
        )
        return Usage(prompt, completion, cached)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
