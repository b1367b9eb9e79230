"""The events of a message of Anthropic's API, in order, and the message that they lead to.

Both forms of an answer are made here: a stream sends the events, and an answer that is not streamed is the message
that they add up to.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from inflight.gateway.opaque_reasoning import seal_reasoning
from inflight.gateway.partial_json import complete_fields, is_object
from inflight.text.output.events import ArgumentsDelta, CallStart, ContentDelta, OutputEvent, ReasoningDelta

Json = dict[str, Any]
UNSIGNED = "unsigned"
"""The signature of thinking whose text is shown: clients send back only what has one, and nothing checks it."""


@dataclass(frozen=True, slots=True)
class MessageUsage:
    """Tokens of a message, as the engine counts them."""

    prompt: int
    cached: int
    written: int | None
    """None: not known."""
    output: int
    thinking: int

    def as_json(self) -> Json:
        """Return the counts as a message has them: the prompt's in three parts, which add up to it."""
        return {
            "input_tokens": self.prompt - self.cached - (self.written or 0),
            "cache_creation_input_tokens": self.written,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.output,
            "output_tokens_details": {"thinking_tokens": self.thinking},
        }


class MessageWriter:
    """Writes one message: what the model puts out goes in, events come out."""

    def __init__(self, model: str, *, omits_thinking: bool = False) -> None:
        """``omits_thinking``: the text of thinking is left out, and its signature carries it in opaque form."""
        self._fields = {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant", "model": model}
        self._omits_thinking = omits_thinking
        self._content: list[Json] = []
        self._open: Json | None = None
        self._pieces: list[str] = []
        """The text of the open block, or its input as JSON."""
        self._cut = False
        """Whether a call before the open block has ended without being complete."""

    @property
    def calls(self) -> bool:
        """Whether there are calls of tools, and all of them are complete."""
        blocks = [*self._content, *([self._open] if self._open is not None else [])]
        return any(block["type"] == "tool_use" for block in blocks) and not (self._cut or self._is_cut())

    def _is_cut(self) -> bool:
        """Whether the open block is a call that is not complete."""
        return self._open is not None and self._open["type"] == "tool_use" and not is_object("".join(self._pieces))

    def begin(self, usage: MessageUsage) -> list[Json]:
        """Return the first events."""
        message = self._message(None, None, usage)
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def add(self, output: OutputEvent) -> list[Json]:
        """Take what the model puts out next; return its events."""
        match output:
            case ContentDelta(text):
                return self._more({"type": "text", "text": ""}, text, {"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                shown = None if self._omits_thinking else {"type": "thinking_delta", "thinking": text}
                return self._more(block, text, shown)
            case CallStart(_, name):
                call: Json = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(16)}", "name": name, "input": {}}
                return self._begin(call)
            case ArgumentsDelta(_, text):
                self._pieces.append(text)
                return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def finish(self, stop_reason: str, stop_sequence: str | None, usage: MessageUsage) -> tuple[list[Json], Json]:
        """End the message; return the last events and the whole message."""
        events = self._end()
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence, "stop_details": None}
        events += [{"type": "message_delta", "delta": delta, "usage": usage.as_json()}, {"type": "message_stop"}]
        return events, self._message(stop_reason, stop_sequence, usage)

    def _more(self, block: Json, text: str, delta: Json | None) -> list[Json]:
        events = [] if self._open is not None and self._open["type"] == block["type"] else self._begin(block)
        self._pieces.append(text)
        return events if delta is None else [*events, self._delta(delta)]

    def _begin(self, block: Json) -> list[Json]:
        events = self._end()
        self._open = block
        return [*events, {"type": "content_block_start", "index": len(self._content), "content_block": dict(block)}]

    def _end(self) -> list[Json]:
        """End the open block, if there is one."""
        block, text = self._open, "".join(self._pieces)
        if block is None:
            return []
        events = []
        if block["type"] == "thinking":
            block["signature"] = seal_reasoning(text) if self._omits_thinking else UNSIGNED
            block["thinking"] = "" if self._omits_thinking else text
            events = [self._delta({"type": "signature_delta", "signature": block["signature"]})]
        elif block["type"] == "text":
            block["text"] = text
        else:
            self._cut = self._cut or self._is_cut()
            block["input"] = complete_fields(text)
        events.append({"type": "content_block_stop", "index": len(self._content)})
        self._content.append(block)
        self._open = None
        self._pieces.clear()
        return events

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content), "delta": delta}

    def _message(self, stop_reason: str | None, stop_sequence: str | None, usage: MessageUsage) -> Json:
        ends = {"stop_reason": stop_reason, "stop_sequence": stop_sequence, "stop_details": None}
        return {**self._fields, "content": list(self._content), **ends, "usage": usage.as_json()}
