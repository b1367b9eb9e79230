"""The events of a response, in order, and the response that they lead to.

Both forms of an answer are made here: a stream sends the events, and an answer that is not streamed is the response
of the last of them. Log-probs are in them as they come; whoever writes the events spells them out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.gateway.errors import ApiError
from inflight.gateway.log_probs import TokenLogProb
from inflight.gateway.responses.items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    CallItem,
    Json,
    MessageItem,
    OutputItem,
    ReasoningItem,
    call_item,
    random_id,
)
from inflight.gateway.responses.tools import CalledTool
from inflight.text.output.events import ArgumentsDelta, CallStart, ContentDelta, OutputEvent, ReasoningDelta

_TOO_LONG = {"reason": "max_output_tokens"}
"""Why a response is incomplete: the limit of its tokens, the end of the context or the deadline. Clients know no other
reason that fits."""
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""Codes that the response of a failure may have; all others are ``server_error``."""


@dataclass(frozen=True, slots=True)
class ResponseUsage:
    """Tokens of a response, as the engine counts them."""

    prompt: int
    cached: int
    written: int | None
    """None: not known."""
    output: int
    reasoning: int

    def as_json(self) -> Json:
        """Return the counts as a response has them."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": self.written or 0},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.output,
        }


class ResponseWriter:
    """Writes one response: what the model puts out goes in, events come out."""

    def __init__(
        self, shown: Json, model: str, called: Mapping[str, CalledTool] | None = None, *, seals_reasoning: bool = False
    ) -> None:
        """
        Args:
            shown: fields of the response that repeat the request.
            model: the model's name.
            called: how calls name the tools, by the functions of the chat.
            seals_reasoning: reasoning is returned in opaque form too.
        """
        self._fields = {"id": random_id("resp"), "object": "response", "created_at": int(time.time()), "model": model}
        self._fields |= shown
        self._called = called or {}
        self._seals_reasoning = seals_reasoning
        self._events = 0
        self._output: list[Json] = []
        self._open: OutputItem | None = None

    def begin(self) -> list[Json]:
        """Return the first events."""
        response = self._response(IN_PROGRESS)
        return [self._event({"type": f"response.{kind}", "response": response}) for kind in ("created", "in_progress")]

    def add(self, output: OutputEvent, log_probs: Sequence[TokenLogProb] = ()) -> list[Json]:
        """Take what the model puts out next; return its events."""
        match output:
            case ContentDelta(text):
                return self._more(MessageItem, text, log_probs)
            case ReasoningDelta(text):
                return self._more(ReasoningItem, text)
            case CallStart(_, name):
                return self._begin(call_item(self._called.get(name) or CalledTool(name)))
            case ArgumentsDelta(_, text):
                return self._more(CallItem, text)

    def add_log_probs(self, log_probs: Sequence[TokenLogProb]) -> list[Json]:
        """Take log-probs of text that has been added before; return their event."""
        return self._more(MessageItem, "", log_probs)

    def finish(self, *, cut: bool, usage: ResponseUsage) -> list[Json]:
        """End the response; return the last events. Without any output it has a message without text.

        Args:
            cut: whether a limit has ended the output.
            usage: the tokens of the response.
        """
        status = INCOMPLETE if cut else COMPLETED
        events = self._begin(MessageItem()) if self._open is None and not self._output else []
        events += self._end(status)
        response = self._response(status, incomplete_details=_TOO_LONG if cut else None, usage=usage.as_json())
        return [*events, self._event({"type": f"response.{status}", "response": response})]

    def fail(self, error: ApiError) -> list[Json]:
        """End the response because of an error; return the last events, after the first ones if there were none yet.

        The event ``error`` has the error twice: OpenAI's types want its fields in the event itself, and OpenAI's
        clients raise what they find under ``error``.
        """
        told = {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}
        events = [] if self._events else self.begin()
        events += self._end(INCOMPLETE)
        fields = {"code": error.code, "message": error.message, "param": error.param}
        events.append(self._event({"type": "error", **fields, **error.body()}))
        return [*events, self._event({"type": "response.failed", "response": self._response("failed", error=told)})]

    def _more(self, kind: type[OutputItem], text: str, log_probs: Sequence[TokenLogProb] = ()) -> list[Json]:
        events = []
        if not isinstance(self._open, kind):
            events = self._begin(ReasoningItem(self._seals_reasoning) if kind is ReasoningItem else kind())
        assert self._open is not None
        return [*events, *map(self._item_event, self._open.add(text, log_probs))]

    def _begin(self, item: OutputItem) -> list[Json]:
        events = self._end(COMPLETED)
        self._open = item
        added = {"type": "response.output_item.added", "item": item.whole(IN_PROGRESS)}
        return [*events, *(self._item_event(event) for event in [added, *item.begin()])]

    def _end(self, status: str) -> list[Json]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        whole = self._open.whole(status)
        done = {"type": "response.output_item.done", "item": whole}
        events = [self._item_event(event) for event in [*self._open.end(), done]]
        self._output.append(whole)
        self._open = None
        return events

    def _item_event(self, event: Json) -> Json:
        return self._event({**event, "output_index": len(self._output)})

    def _event(self, event: Json) -> Json:
        self._events += 1
        return {**event, "sequence_number": self._events - 1}

    def _response(self, status: str, **more: Any) -> Json:
        completed_at = int(time.time()) if status == COMPLETED else None
        ends = {"error": None, "incomplete_details": None, "usage": None} | more
        return {**self._fields, "status": status, "completed_at": completed_at, "output": list(self._output), **ends}
