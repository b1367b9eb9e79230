"""An engine that says what a test wants: in place of the gateway's client of a real one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from inflight.errors import InflightError
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.text.chat import ChatTemplate
from inflight.text.output.families import HermesFormat
from inflight.text.tokenizer import Tokenizer
from tests.gateway.support.gateways import Inside, inside

TEMPLATE = """
{%- for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>
{% endfor %}
{%- for message in messages %}<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}
"""
"""In the manner of Qwen 3's."""


@dataclass
class Script:
    """What the engine answers to the next requests."""

    text: str = ""
    finish_reason: str = "stop"
    pieces: int | None = None
    """Seed of how the tokens are cut into responses; None: one response."""
    error: InflightError | None = None
    """What ends the answer in place of its last token."""
    cached: int = 0
    request: GenerateRequest | None = None
    """The last request."""
    closed: int = 0
    """Answers that were closed before their end."""


class ScriptedEngine:
    """Answers with the tokens of a script. Each token's log-prob is minus its place, and its id is the likeliest."""

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self._tokenizer, self._script = tokenizer, script

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        """Yield the script's responses."""
        script = self._script
        script.request = request
        [tokens] = self._tokenizer.encode_batch([script.text], add_special_tokens=False)
        done = 0
        try:
            for size in _sizes(len(tokens), script.pieces if request.stream else None):
                await asyncio.sleep(0)
                part = tokens[done : done + size]
                done += size
                ends = done == len(tokens)
                if ends and script.error is not None:
                    raise script.error
                yield _delta(request, script, part, done, ends)
        finally:
            script.closed += done < len(tokens)

    async def close(self) -> None:
        """Close nothing."""


def _delta(request: GenerateRequest, script: Script, part: list[int], done: int, ends: bool) -> EngineDelta:
    scores = [-float(done - len(part) + place) for place in range(len(part))] if request.log_probs else []
    top = [[(token, score)] for token, score in zip(part, scores, strict=True)] if request.top_log_probs else []
    reason = script.finish_reason if ends else None
    return EngineDelta(0, part, None, reason, scores, top, done, script.cached if ends else 0, {})


def _sizes(count: int, seed: int | None) -> Iterator[int]:
    """Return the sizes of the responses."""
    if seed is None or count == 0:
        yield count
        return
    draw = random.Random(seed)
    while count:
        size = draw.randint(1, min(count, 4))
        count -= size
        yield size


@contextmanager
def served_by(make_engine: Callable[[Tokenizer], Any], **settings: Any) -> Iterator[Inside]:
    """Serve the demo with Qwen's format of calls and reasoning, and another engine."""
    with inside(ready=True, **settings) as running:
        tokenizer = running.gateway.tokenizer
        chat_format = HermesFormat(tokenizer)
        chat_format.has_reasoning = True
        app: Any = running.server.config.app
        app.state.gateway = replace(
            running.gateway,
            chat_template=ChatTemplate(TEMPLATE, {}),
            chat_format=chat_format,
            engine=make_engine(tokenizer),
        )
        yield running


@contextmanager
def scripted(**settings: Any) -> Iterator[tuple[Inside, Script]]:
    """Serve the demo with an engine that follows the script."""
    script = Script()
    with served_by(lambda tokenizer: ScriptedEngine(tokenizer, script), **settings) as running:
        yield running, script
