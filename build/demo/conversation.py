"""A conversation with tools in the words of the demo's own chat template, so that training sees what serving sends.

It does not know what the conversations are about, nor token ids.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8").rstrip("\n")
TURN_END = "<|im_end|>"
Message = dict[str, Any]
Tool = dict[str, Any]
Segment = tuple[str, bool]


def to_json(value: Any) -> str:
    """Return JSON as the template writes it, and as the model should."""
    return json.dumps(value, ensure_ascii=False)


@cache
def _template() -> Any:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    return environment.from_string(CHAT_TEMPLATE)


def render(messages: list[Message], tools: list[Tool] | None = None, **options: Any) -> str:
    """Return the text of `messages`; `options` are `add_generation_prompt` and `enable_thinking`."""
    text: str = _template().render(messages=messages, tools=tools, **options)
    return text


def segments_of(messages: list[Message], tools: list[Tool] | None = None, thought: str = "") -> list[Segment]:
    """Return a conversation as (text, is trained on) pairs: the model learns what the assistant says alone.

    With a `thought` the last answer begins with it, and its prompt asks for one.
    """
    segments: list[Segment] = []
    done = 0
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        thinks = bool(thought) and at == len(messages) - 1
        begun = render(messages[:at], tools, add_generation_prompt=True)
        whole = render(messages[: at + 1], tools)
        asked = begun[done:] + ("<think>\n" if thinks else "")
        answer = whole[len(begun) : -1]
        segments += [(asked, False), (f"{thought}\n</think>\n\n{answer}" if thinks else answer, True)]
        done = len(whole) - 1
    return segments
