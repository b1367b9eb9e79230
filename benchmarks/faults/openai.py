"""OpenAI's API as its plainest client reads it: nothing is tried again, so what the server does is seen."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from inflight.errors import EngineFailure

_PATH = "/v1/chat/completions"
_DATA, _DONE = "data: ", "data: [DONE]"


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
    """Yield the texts of an answer as they come.

    Raises:
        EngineFailure: an event of the stream is an error.
        httpx.HTTPError: the status is one, or the connection ended before the last event.
    """
    async with client.stream("POST", _PATH, json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line == _DONE:
                return
            if line.startswith(_DATA):
                event = json.loads(line.removeprefix(_DATA))
                if "error" in event:
                    raise EngineFailure(str(event["error"]["message"]))
                yield "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    raise httpx.RemoteProtocolError("the stream ended without its last event")
