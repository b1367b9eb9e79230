"""/v1/chat/completions: a chat to one answer or several, streamed or whole, both from the same stream of the engine."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from inflight.gateway.chat_request import chat_job
from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.counting import counted
from inflight.gateway.field_tables import CHAT_READER
from inflight.gateway.fields import Fields
from inflight.gateway.generation import ChoiceDelta, Job, PromptScores, Usage
from inflight.gateway.log_probs import TokenLogProb, TokenNames, chat_log_probs
from inflight.gateway.preparing import prepared
from inflight.gateway.prompt_log_probs import prompt_log_probs
from inflight.gateway.sampling import wants_stream
from inflight.gateway.sse import EventStream, event, while_connected
from inflight.gateway.tools import tools_left_out
from inflight.gateway.usage import StreamedCounts, usage_object
from inflight.gateway.workers import off_loop, written
from inflight.text.output.events import ArgumentsDelta, CallStart, ContentDelta, OutputEvent, ReasoningDelta


async def chat_completions(request: Request) -> Response:
    """Answer a chat. Raises ApiError: before anything is sent."""
    gateway = gateway_of(request)
    fields, job, answer = await prepared(request, _prepare)
    gateway.metrics.ignored_fields(fields.ignored)
    deltas = counted(request, gateway, job)
    if job.request.stream:
        return EventStream(request, answer.events(deltas), headers=fields.headers())
    body = await while_connected(request, answer.whole(deltas))
    return Response(body, media_type="application/json", headers=fields.headers())


def _prepare(request: Request, gateway: Gateway, body: dict[str, Any]) -> tuple[Fields, Job, ChatAnswer]:
    fields = gateway.read(CHAT_READER, body)
    fields = fields.naming(tools_left_out(fields), strict=gateway.settings.strict_fields)
    job = chat_job(request, fields, gateway, stream=wants_stream(fields))
    return fields, job, ChatAnswer(fields, gateway, job)


class ChatAnswer:
    """Writes the answer to one request."""

    def __init__(self, fields: Fields, gateway: Gateway, job: Job) -> None:
        self._fields, self._job = fields, job
        given = fields.either("request_id", "rid")
        self._head = {
            "id": f"chatcmpl-{given or secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": fields["model"],
        }
        self._names = TokenNames(gateway.tokenizer, as_ids=fields.get("return_tokens_as_token_ids", False))
        self._log_probs = job.request.log_probs
        self._reasons = fields.get("include_reasoning", True)
        self._returns_ids = fields.get("return_token_ids", False)

    async def whole(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> str:
        """Return the whole answer, as JSON."""
        choices = [_WholeChoice(index) for index in range(self._job.request.sequences)]
        usage, scores = Usage(0, 0), None
        async with aclosing(deltas):
            async for delta in deltas:
                choices[delta.index].add(delta, self._shown(delta.events))
                usage, scores = delta.usage, delta.prompt_scores
        pieces = 8 * (1 + self._job.request.top_log_probs) * sum(len(choice.log_probs) for choice in choices)
        return await off_loop(lambda: self._written(choices, usage, scores), pieces + self._pieces(scores))

    def _written(self, choices: Sequence[_WholeChoice], usage: Usage, scores: PromptScores | None) -> str:
        head = _json({**self._head, "object": "chat.completion"})
        more = {"usage": usage_object(usage), **self._of_prompt(scores)}
        parts = ",".join(written(self._choice(choice)) for choice in choices)
        return f'{head[:-1]},"choices":[{parts}],{written(more)[1:]}'

    async def events(self, deltas: AsyncGenerator[ChoiceDelta, None]) -> AsyncIterator[bytes]:
        """Yield the chunks of a streamed answer."""
        counts = StreamedCounts.asked(self._fields)
        states = [_StreamedChoice() for _ in range(self._job.request.sequences)]
        chunks = _ChunkWriter(self._head)
        usage, first = Usage(0, 0), True
        async with aclosing(deltas):
            async for delta in deltas:
                usage = delta.usage
                said = {"usage": usage_object(usage)} if counts.in_each else {}
                for choice in self._streamed(states[delta.index], delta):
                    if first:
                        first = False
                        write = partial(self._first_chunk, chunks, choice, said, delta.prompt_scores)
                        yield await off_loop(write, self._pieces(delta.prompt_scores))
                    else:
                        yield chunks.chunk(choice, said)
        if counts.at_the_end:
            yield chunks.usage(usage_object(usage))

    def _first_chunk(
        self, chunks: _ChunkWriter, choice: dict[str, Any], said: dict[str, Any], scores: PromptScores | None
    ) -> bytes:
        return chunks.chunk(choice, said | self._of_prompt(scores))

    def _pieces(self, scores: PromptScores | None) -> int:
        """Return how much is to be written of the prompt's log-probs."""
        return 0 if scores is None else 8 * len(scores.log_probs) * (1 + (self._job.request.prompt_log_probs or 0))

    def _of_prompt(self, scores: PromptScores | None) -> dict[str, Any]:
        """Return what an answer, or the first chunk of a stream, says of the prompt."""
        prompt, count = self._job.request.prompt, self._job.request.prompt_log_probs
        said: dict[str, Any] = {"prompt_token_ids": list(prompt)} if self._returns_ids else {}
        if count is not None and scores is not None:
            said["prompt_logprobs"] = prompt_log_probs(prompt, scores, count, self._names)
        return said

    def _streamed(self, state: _StreamedChoice, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """Return the choices of the chunks for a delta: none while nothing can be shown, a last one with the end."""
        state.log_probs += delta.log_probs
        state.token_ids += delta.token_ids
        said = state.delta(self._shown(delta.events))
        chunks = []
        if said or (delta.token_ids and not state.begun) or (delta.finish_reason and not state.begun):
            chunks.append(self._chunk_choice(delta.index, state.begin(said), state, None))
        if delta.finish_reason:
            rest = {} if state.said else {"content": ""}
            last = self._chunk_choice(delta.index, rest, state, delta.finish_reason)
            chunks.append(last | {"stop_reason": delta.stop_reason})
        return chunks

    def _chunk_choice(
        self, index: int, said: dict[str, Any], state: _StreamedChoice, reason: str | None
    ) -> dict[str, Any]:
        entries, ids = state.take()
        scores = chat_log_probs(entries, self._names) if self._log_probs and (entries or reason is None) else None
        choice = {"index": index, "delta": said, "logprobs": scores, "finish_reason": reason}
        return choice | ({"token_ids": ids} if self._returns_ids else {})

    def _choice(self, choice: _WholeChoice) -> dict[str, Any]:
        said = {
            "index": choice.index,
            "message": choice.message(),
            "logprobs": chat_log_probs(choice.log_probs, self._names) if self._log_probs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return said | ({"token_ids": choice.token_ids} if self._returns_ids else {})

    def _shown(self, events: list[OutputEvent]) -> list[OutputEvent]:
        if self._reasons:
            return events
        return [event for event in events if not isinstance(event, ReasoningDelta)]


@dataclass(slots=True)
class _StreamedChoice:
    """What of a choice is under way to the client."""

    begun: bool = False
    """Whether the chunk with the role has been sent."""
    said: bool = False
    """Whether any text, reasoning or call has been sent."""
    log_probs: list[TokenLogProb] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def delta(self, events: Sequence[OutputEvent]) -> dict[str, Any]:
        """Return events as the ``delta`` of one chunk; {} for none."""
        said: dict[str, Any] = {}
        content = "".join(one.text for one in events if isinstance(one, ContentDelta))
        reasoning = "".join(one.text for one in events if isinstance(one, ReasoningDelta))
        calls = merge_calls(events)
        if reasoning:
            said |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if content:
            said["content"] = content
        if calls:
            said["tool_calls"] = calls
        self.said = self.said or bool(said)
        return said

    def begin(self, said: dict[str, Any]) -> dict[str, Any]:
        """Return the delta of a chunk, with the role if it is the first."""
        if self.begun:
            return said
        self.begun = True
        return {"role": "assistant", "content": None, **said}

    def take(self) -> tuple[list[TokenLogProb], list[int]]:
        """Return what goes with the next chunk: the log-probs and the tokens since the one before."""
        taken = self.log_probs, self.token_ids
        self.log_probs, self.token_ids = [], []
        return taken


def merge_calls(events: Sequence[OutputEvent]) -> list[dict[str, Any]]:
    """Return what events say of calls as OpenAI's tool deltas, one for each call; ids and names come once."""
    calls: dict[int, dict[str, Any]] = {}
    for one in events:
        if isinstance(one, CallStart):
            function = {"name": one.name, "arguments": ""}
            calls[one.index] = {"index": one.index, "id": new_call_id(), "type": "function", "function": function}
        elif isinstance(one, ArgumentsDelta):
            call = calls.setdefault(one.index, {"index": one.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += one.text
    return list(calls.values())


def new_call_id() -> str:
    """Return an id for a call of a tool."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class _WholeChoice:
    """A choice of a whole answer: its stream, collected."""

    index: int
    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    log_probs: list[TokenLogProb] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None

    def add(self, delta: ChoiceDelta, events: Sequence[OutputEvent]) -> None:
        """Take what is new."""
        for one in events:
            if isinstance(one, ContentDelta):
                self.content += one.text
            elif isinstance(one, ReasoningDelta):
                self.reasoning += one.text
        for call in merge_calls(events):
            index = call.pop("index")
            if index in self.calls:
                self.calls[index]["function"]["arguments"] += call["function"]["arguments"]
            else:
                self.calls[index] = call
        self.log_probs += delta.log_probs
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def message(self) -> dict[str, Any]:
        """Return the message; its content is null where there are calls, or reasoning, and no text."""
        beside = self.calls or self.reasoning
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if beside else "")}
        message["refusal"] = None
        if self.reasoning:
            message |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        if self.calls:
            message["tool_calls"] = list(self.calls.values())
        return message


class _ChunkWriter:
    """Writes the chunks of one answer; what they have in common is made once."""

    def __init__(self, head: dict[str, Any]) -> None:
        common = _json({**head, "object": "chat.completion.chunk"})
        self._begin = f'{common[:-1]},"choices":'

    def chunk(self, choice: dict[str, Any], more: dict[str, Any]) -> bytes:
        """Return a chunk with one choice."""
        rest = f",{written(more)[1:]}" if more else "}"
        return event(f"{self._begin}[{_json(choice)}]{rest}")

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the chunk with the counts of tokens, which has no choice."""
        return event(f'{self._begin}[],"usage":{_json(usage)}}}')


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
