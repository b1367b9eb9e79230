"""OpenAI's API as its plainest client reads it: nothing is tried again, so what the server does is seen."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from inflight.client import Completion, Usage
from inflight.errors import EngineFailure

_PATH = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_DATA, _DONE = "data: ", "data: [DONE]"
_AS_ID = "token_id:"
"""What stands before the number of a token that is named by its id."""


def chat(model: str, question: str, tokens: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a request for exactly so many tokens."""
    messages = [{"role": "user", "content": question}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": True, **fields}


async def model_name(client: httpx.AsyncClient) -> str:
    """Return the name of the model that is served. Raises httpx.HTTPError."""
    models = (await client.get("/v1/models")).raise_for_status().json()
    return str(models["data"][0]["id"])


async def whole_text(client: httpx.AsyncClient, body: Mapping[str, Any]) -> str:
    """Return the text of an answer that comes as a whole. Raises httpx.HTTPError."""
    answer = (await client.post(_PATH, json=body)).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


async def streamed_texts(client: httpx.AsyncClient, body: Mapping[str, Any]) -> AsyncIterator[str]:
    """Yield the texts of a chat's answer as they come.

    Raises:
        EngineFailure: an event of the stream is an error.
        httpx.HTTPError: the status is one, or the connection ended before the last event.
    """
    async with aclosing(_events(client, _PATH, body)) as events:
        async for event in events:
            yield "".join(choice["delta"].get("content") or "" for choice in event["choices"])


async def streamed_completion(
    client: httpx.AsyncClient, body: Mapping[str, Any], on_tokens: Callable[[int], object]
) -> Completion:
    """Return the streamed answer to one prompt of `/v1/completions`, its first choice with the others beside it.

    Args:
        client: whose base address is the gateway's.
        body: what is asked, with ``n`` where there are several choices.
        on_tokens: called with the number of new tokens whenever some come.

    Raises:
        EngineFailure: an event of the stream is an error.
        httpx.HTTPError: the status is one, or the connection ended before the last event.
    """
    choices = [_Choice() for _ in range(body.get("n", 1))]
    usage = Usage()
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True, "stream_options": {"include_usage": True}}
    async with aclosing(_events(client, _COMPLETIONS, {**body, **more})) as events:
        async for event in events:
            for part in event["choices"]:
                choices[part["index"]].add(part)
                on_tokens(len(part["token_ids"]))
            if counts := event.get("usage"):
                usage = Usage(counts["prompt_tokens"], counts["completion_tokens"])
    first, *others = (choice.completion(usage) for choice in choices)
    return replace(first, alternatives=tuple(others))


@dataclass
class _Choice:
    """What has come of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, part: Mapping[str, Any]) -> None:
        self.text += part["text"]
        self.token_ids += part["token_ids"]
        self.finish_reason = part["finish_reason"] or self.finish_reason
        if scores := part["logprobs"]:
            self.log_probs += scores["token_logprobs"]
            for likeliest in scores["top_logprobs"]:
                pairs = (likeliest or {}).items()
                self.top.append(tuple((int(name.removeprefix(_AS_ID)), value) for name, value in pairs))

    def completion(self, usage: Usage) -> Completion:
        """Return it as Inflight's clients return an answer."""
        return Completion(
            self.text,
            self.finish_reason,
            usage,
            log_probs=tuple(self.log_probs),
            top_log_probs=tuple(self.top),
            token_ids=tuple(self.token_ids),
        )


async def _events(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line == _DONE:
                return
            if line.startswith(_DATA):
                event = json.loads(line.removeprefix(_DATA))
                if "error" in event:
                    raise EngineFailure(str(event["error"]["message"]))
                yield event
    raise httpx.RemoteProtocolError("the stream ended without its last event")
