"""Items of a response's output: each is open while the model writes it, and has its own events on the way."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from inflight.gateway.log_probs import TokenLogProb
from inflight.gateway.opaque_reasoning import seal_reasoning
from inflight.gateway.partial_json import is_object
from inflight.gateway.responses.tools import CalledTool, custom_input

Json = dict[str, Any]
"""What JSON has, with log-probs as they come."""
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


def random_id(prefix: str) -> str:
    """Return an id such as ``msg_3f…``, which nobody can guess."""
    return f"{prefix}_{secrets.token_hex(16)}"


class OutputItem(ABC):
    """An item that is being written. Its events have no ``sequence_number`` and ``output_index`` yet."""

    prefix: str
    """The beginning of its id."""

    def __init__(self) -> None:
        self.id = random_id(self.prefix)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """What has been written so far."""
        return "".join(self._pieces)

    def add(self, text: str, log_probs: Sequence[TokenLogProb]) -> list[Json]:
        """Take more text; return the event that tells it, if there is one yet."""
        self._pieces.append(text)
        return [self._event(self.delta, delta=text, **self.place)]

    delta: str
    """The type of the event of more text."""
    place: ClassVar[Json] = {}
    """The fields of that event that say where the text stands."""

    @abstractmethod
    def begin(self) -> list[Json]:
        """Return the events that begin what is inside of the item."""

    @abstractmethod
    def end(self) -> list[Json]:
        """Return the events that end it."""

    @abstractmethod
    def whole(self, status: str) -> Json:
        """Return the item as a response has it."""

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.id, **fields}


class _WithPart(OutputItem):
    """An item with one part of text in its content."""

    place: ClassVar[Json] = {"content_index": 0}

    @abstractmethod
    def part(self) -> Json:
        """Return the part as it is now."""

    def begin(self) -> list[Json]:
        return [self._event("response.content_part.added", content_index=0, part=self.part())]

    def end(self) -> list[Json]:
        return [self.done(), self._event("response.content_part.done", content_index=0, part=self.part())]

    def done(self) -> Json:
        """Return the event of the whole text."""
        return self._event(self.delta.replace(".delta", ".done"), content_index=0, text=self.text)


class MessageItem(_WithPart):
    """The model's answer."""

    prefix, delta = "msg", "response.output_text.delta"

    def __init__(self) -> None:
        super().__init__()
        self._log_probs: list[TokenLogProb] = []

    def part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._log_probs)}

    def add(self, text: str, log_probs: Sequence[TokenLogProb]) -> list[Json]:
        self._log_probs += log_probs
        return [event | {"logprobs": list(log_probs)} for event in super().add(text, ())]

    def done(self) -> Json:
        return super().done() | {"logprobs": list(self._log_probs)}

    def whole(self, status: str) -> Json:
        content = [] if status == IN_PROGRESS else [self.part()]
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": content}


class ReasoningItem(_WithPart):
    """What the model thought before its answer."""

    prefix, delta = "rs", "response.reasoning_text.delta"

    def __init__(self, sealed: bool) -> None:
        """``sealed``: the item also has the text in opaque form."""
        super().__init__()
        self._sealed = sealed

    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def whole(self, status: str) -> Json:
        content = [] if status == IN_PROGRESS else [self.part()]
        item = {"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": content}
        return item | ({"encrypted_content": seal_reasoning(self.text)} if self._sealed and content else {})


class CallItem(OutputItem):
    """A call of a function. It is complete with its arguments, whatever ends the output."""

    prefix, delta = "fc", "response.function_call_arguments.delta"
    kind = "function_call"

    def __init__(self, tool: CalledTool) -> None:
        super().__init__()
        names = {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace is not None else {})
        self._call = {"type": self.kind, "id": self.id, "call_id": random_id("call"), **names}

    def begin(self) -> list[Json]:
        return []

    def end(self) -> list[Json]:
        kind = "response.function_call_arguments.done"
        return [self._event(kind, name=self._call["name"], arguments=self.text)]

    def whole(self, status: str) -> Json:
        if status != IN_PROGRESS:
            status = COMPLETED if is_object(self.text) else INCOMPLETE
        return {**self._call, "status": status, "arguments": self.text}


class CustomCallItem(CallItem):
    """A call of a custom tool. Its text is told when all of it is there, since the model writes it as JSON."""

    prefix, delta = "ctc", "response.custom_tool_call_input.delta"
    kind = "custom_tool_call"

    def add(self, text: str, log_probs: Sequence[TokenLogProb]) -> list[Json]:
        self._pieces.append(text)
        return []

    def end(self) -> list[Json]:
        text = custom_input(self.text)
        return [
            self._event(self.delta, delta=text),
            self._event("response.custom_tool_call_input.done", input=text),
        ]

    def whole(self, status: str) -> Json:
        return {**self._call, "status": status, "input": "" if status == IN_PROGRESS else custom_input(self.text)}


def call_item(tool: CalledTool) -> CallItem:
    """Return the item of a call."""
    return CustomCallItem(tool) if tool.is_custom else CallItem(tool)
