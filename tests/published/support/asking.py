"""Asks a gateway's API as OpenAI has it, one request or many at once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Body = Mapping[str, Any]


class Answer(NamedTuple):
    """What one choice came to."""

    text: str
    finish_reason: str
    usage: Mapping[str, Any]
    message: Mapping[str, Any]
    """Of a chat that is not streamed."""

    @property
    def cached(self) -> int:
        """Tokens of the prompt that the KV cache had."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class Asking:
    """Clients of one gateway, for its only model."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=600)
        self._model = self._client.get("/v1/models").json()["data"][0]["id"]

    def post(self, path: str, body: Body) -> httpx.Response:
        """Send a request."""
        return self._client.post(path, json={"model": self._model, **body})

    def ask(self, body: Body) -> Answer:
        """Return the whole answer to a chat, or to a completion where there is a prompt."""
        path = COMPLETIONS if "prompt" in body else CHAT
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        [choice] = (read := answer.json())["choices"]
        message = choice.get("message", {})
        return Answer(choice.get("text", message.get("content")), choice["finish_reason"], read["usage"], message)

    def stream(self, body: Body) -> Answer:
        """Return the parts of a streamed answer, joined."""
        path = COMPLETIONS if "prompt" in body else CHAT
        whole = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, **body}
        text, reason, usage = "", "", {}
        with self._client.stream("POST", path, json=whole) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    text += choice.get("text", choice.get("delta", {}).get("content")) or ""
                    reason = choice["finish_reason"] or reason
        return Answer(text, reason, usage, {})

    def stream_at_once(self, bodies: Iterable[Body]) -> list[Answer]:
        """Return the answers to streams that run beside each other."""
        asked = list(bodies)
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(self.stream, asked))
