"""Input items of the Responses API to chat messages.

A turn of the assistant is several items (reasoning, message, calls) and one chat message. What comes before the
conversation, instructions and messages of the system or the developer, becomes one message: most templates know one,
and at the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from inflight.gateway.opaque_reasoning import open_reasoning
from inflight.gateway.reading import JsonValue
from inflight.gateway.values import one_of

Message = dict[str, Any]

_MESSAGE = frozenset({"type", "role", "content", "id", "status", "phase"})
_CALL = frozenset({"type", "id", "call_id", "name", "arguments", "status", "namespace", "caller"})
_OUTPUT = frozenset({"type", "id", "call_id", "output", "status", "name", "namespace", "caller"})
_REASONING = frozenset({"type", "id", "summary", "content", "encrypted_content", "status"})
_AGENT = frozenset({"type", "id", "author", "recipient", "content", "status"})
_TEXT = frozenset({"type", "text", "annotations", "logprobs", "refusal", "id"})
_LEADING = ("system", "developer")
_ROLE = one_of("user", "assistant", *_LEADING)
_NO_STORE = "nothing is stored; send the item itself"


def read_messages(instructions: str | None, source: JsonValue) -> list[Message]:
    """Return the chat of a request's ``instructions`` and its ``input``, the ``source``.

    Raises:
        ApiError: naming the item and what is wrong with it.
    """
    conversation = _Conversation()
    if instructions:
        conversation.add("system", instructions)
    if isinstance(source.value, str):
        conversation.add("user", source.text())
    else:
        for item in source.elements():
            _add_item(conversation, item)
        if not source.value:
            raise source.error("is empty; it must have at least one item")
    return conversation.finish()


class _Conversation:
    """Gathers messages in order; the assistant's last one stays open for more items of its turn."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._open: Message | None = None
        self._names: dict[str, str] = {}
        """The function that each call calls, by the call's id."""

    def add(self, role: str, text: str) -> None:
        """Add a message that is not the assistant's; what leads the conversation is joined."""
        self._close()
        first = self._messages[-1] if len(self._messages) == 1 else None
        if role in _LEADING and first is not None and first["role"] in _LEADING:
            first["content"] += f"\n\n{text}"
            first["role"] = "system" if role != first["role"] else role
        else:
            self._messages.append({"role": role, "content": text})

    def add_reasoning(self, text: str) -> None:
        """Add what the assistant thought before the rest of its turn."""
        message = self._turn("content", "tool_calls")
        before = message.get("reasoning_content")
        message["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def add_answer(self, text: str) -> None:
        """Add the assistant's text."""
        self._turn("content", "tool_calls")["content"] = text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call to the assistant's turn."""
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def add_output(self, call_id: JsonValue, text: str) -> None:
        """Add the output of a call. Raises ApiError: there is no such call before it."""
        self._close()
        name = self._names.get(call_id.name())
        if name is None:
            raise call_id.error(f"is {call_id.value!r}; no function_call before it has this call_id")
        self._messages.append({"role": "tool", "tool_call_id": call_id.value, "name": name, "content": text})

    def finish(self) -> list[Message]:
        """Return all messages."""
        self._close()
        return self._messages

    def _turn(self, *later: str) -> Message:
        """Return the assistant's open message, or a new one where the open one has come to what is ``later``."""
        if self._open is not None and any(key in self._open for key in later):
            self._close()
        if self._open is None:
            self._open = {"role": "assistant"}
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self._messages.append({"content": None} | self._open)
            self._open = None


def _add_item(conversation: _Conversation, item: JsonValue) -> None:
    kind = item.get("type")
    if kind is None:
        name = "message" if "role" in item.object() or "id" not in item.object() else "item_reference"
    else:
        name = kind.text()
    if name == "item_reference":
        raise (kind or item).refusal(_NO_STORE)
    if name not in _READERS:
        raise (kind or item).refusal(f"items of type {name[:64]!r}; those of type {', '.join(_READERS)} are served")
    _READERS[name](conversation, item)


def _add_message(conversation: _Conversation, item: JsonValue) -> None:
    item.only(_MESSAGE)
    role = item.need("role").read(_ROLE)
    text = read_text(item.need("content"))
    if role == "assistant":
        conversation.add_answer(text)
    else:
        conversation.add(role, text)


def _add_agent_message(conversation: _Conversation, item: JsonValue) -> None:
    """Add what another agent says to this one; to the model that is a user's message which names the two."""
    item.only(_AGENT)
    ends = [
        f"{word} {end.text()}" for word, name in (("from", "author"), ("to", "recipient")) if (end := item.get(name))
    ]
    head = f"Message {' '.join(ends)}:\n" if ends else ""
    conversation.add("user", head + read_text(item.need("content")))


def _add_call(conversation: _Conversation, item: JsonValue) -> None:
    item.only(_CALL)
    arguments = item.need("arguments")
    conversation.add_call(item.need("call_id").name(), item.need("name").name(), _read_arguments(arguments))


def _read_arguments(arguments: JsonValue) -> str:
    text = arguments.text() or "{}"
    try:
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError) as error:
        raise arguments.error(f"is not valid JSON: {error}") from None
    raise arguments.error("must be the JSON of an object")


def _add_output(conversation: _Conversation, item: JsonValue) -> None:
    item.only(_OUTPUT)
    conversation.add_output(item.need("call_id"), read_text(item.need("output")))


def _add_reasoning(conversation: _Conversation, item: JsonValue) -> None:
    """Add the reasoning of an item: its text, or else the opaque form of it, or else its summary."""
    item.only(_REASONING)
    content, sealed, summary = (item.get(name) for name in ("content", "encrypted_content", "summary"))
    text = read_text(content) if content else ""
    if not text and sealed is not None and sealed.text():
        text = open_reasoning(sealed.text()) or ""
        if not text and not (summary and summary.value):
            raise sealed.error("was not made by this server, which cannot read it")
    if not text and summary is not None:
        text = read_text(summary)
    if text:
        conversation.add_reasoning(text)


def read_text(content: JsonValue) -> str:
    """Return the text of a string or of a list of parts that are text.

    Raises:
        ApiError: naming the part, which is no text.
    """
    if isinstance(content.value, str):
        return content.text()
    return "\n".join(_part_text(part) for part in content.elements())


def _part_text(part: JsonValue) -> str:
    kind = part.need("type")
    match kind.text():
        case "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text":
            part.only(_TEXT)
            return part.need("text").text()
        case "refusal":
            part.only(_TEXT)
            return part.need("refusal").text()
        case "input_image" | "input_file" | "input_audio" | "input_video" | "image" | "computer_screenshot" as other:
            raise kind.refusal(f"{other}; this model takes text alone")
        case other:
            raise kind.error(f"is {other[:64]!r}; parts of type input_text, output_text and refusal are served")


_READERS: dict[str, Callable[[_Conversation, JsonValue], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_output,
    "reasoning": _add_reasoning,
    "agent_message": _add_agent_message,
}
