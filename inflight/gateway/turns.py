"""Gathers what agents' APIs send piece by piece as the messages of a chat, in the order that chat templates expect.

All that the assistant says in a row, reasoning, texts and calls, is one message. The output of a call stands behind the
message that has the call, whatever came between the two. What leads the conversation, of the system and the developer,
is one message, since most templates know one, at the beginning.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]
_LEADING = ("system", "developer")


class Turns:
    """The messages of one conversation."""

    def __init__(self, *, merges_users: bool = False) -> None:
        """``merges_users``: what the user says in a row is one message too."""
        self._merges_users = merges_users
        self._found: list[tuple[Message, str]] = []
        """The messages, each with the path of what it begins with."""
        self._calls: dict[str, tuple[Message, str]] = {}
        """The message and the function of each call, by the call's id."""

    def say(self, role: str, text: str, place: str) -> None:
        """Add a message of the user, the system or the developer, which stands at ``place`` in the request."""
        last = self._found[-1][0] if self._found else {"role": ""}
        if role in _LEADING and last["role"] in _LEADING and len(self._found) == 1:
            last["content"] += f"\n\n{text}"
            last["role"] = role if role == last["role"] else "system"
        elif role == last["role"] == "user" and self._merges_users:
            _add_text(last, "content", text)
        else:
            self._found.append(({"role": role, "content": text}, place))

    def think(self, text: str, place: str) -> None:
        """Add reasoning to the assistant's turn."""
        _add_text(self._turn(place), "reasoning_content", text)

    def answer(self, text: str, place: str) -> None:
        """Add text to the assistant's turn."""
        _add_text(self._turn(place), "content", text)

    def call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        """Add a call to the assistant's turn."""
        message = self._turn(place)
        self._calls[call_id] = message, name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message.setdefault("tool_calls", []).append(call)

    def has_call(self, call_id: str) -> bool:
        """Return whether there is a call of this id."""
        return call_id in self._calls

    def output(self, call_id: str, text: str, place: str) -> None:
        """Add the output of a call, which there is."""
        message, name = self._calls[call_id]
        behind = len(self._found)
        while self._found[behind - 1][0] is not message and self._found[behind - 1][0]["role"] != "tool":
            behind -= 1
        output = {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}
        self._found.insert(behind, (output, place))

    def messages(self) -> list[Message]:
        """Return all messages. One of the assistant without text has none beside calls, and an empty one otherwise."""
        return [_whole(message) for message, _ in self._found]

    def places(self) -> list[str]:
        """Return the path in the request of what each message begins with."""
        return [place for _, place in self._found]

    def _turn(self, place: str) -> Message:
        """Return the assistant's message that is the last one."""
        if not self._found or self._found[-1][0]["role"] != "assistant":
            self._found.append(({"role": "assistant"}, place))
        return self._found[-1][0]


def _add_text(message: Message, name: str, text: str) -> None:
    """Put text behind what a message has of a kind; an empty text adds nothing to it."""
    before = message.get(name)
    message[name] = f"{before}\n{text}" if before and text else before or text


def _whole(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return message | {"content": message.get("content") or (None if "tool_calls" in message else "")}
