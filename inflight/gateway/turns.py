"""Gathers what agents' APIs send piece by piece as the messages of a chat, in the order that chat templates expect.

All that the assistant says in a row, reasoning, texts and calls, is one message. The output of a call stands behind the
message that has the call, whatever came between the two. What leads the conversation, of the system and the developer,
is one message, since most templates know one, at the beginning. Where the template refuses or drops a later one, its
text is the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from inflight.text.chat import ChatTemplate

Message = dict[str, Any]
_LEADING = ("system", "developer")


@dataclass
class _Turn:
    """What one speaker says in a row, and the outputs of the calls in it."""

    role: str
    place: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[tuple[Message, str]] = field(default_factory=list)
    """The tools' messages, each with its place."""

    def message(self) -> Message:
        """Return the message. One of the assistant without text has none beside calls, and an empty one otherwise."""
        text = ("\n\n" if self.role in _LEADING else "\n").join(filter(None, self.texts))
        message: Message = {"role": self.role, "content": None if self.calls and not text else text}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        return message | ({"tool_calls": self.calls} if self.calls else {})


@dataclass(frozen=True)
class TurnRules:
    """Orders of roles that a chat template takes."""

    late_system: bool = True
    """Messages of the system that do not lead the conversation."""
    users_in_a_row: bool = True

    @classmethod
    def of(cls, template: ChatTemplate | None) -> TurnRules:
        """Return the rules of a template."""
        return cls() if template is None else cls(template.takes_late_system, template.takes_users_in_a_row)


class Turns:
    """The messages of one conversation."""

    def __init__(self, rules: TurnRules, *, merges_users: bool = False) -> None:
        """
        Args:
            rules: of the chat template.
            merges_users: what the user says in a row is one message, whatever the template takes.
        """
        self._rules, self._merges_users = rules, merges_users or not rules.users_in_a_row
        self._turns: list[_Turn] = []
        self._calls: dict[str, tuple[_Turn, str]] = {}
        """The turn and the function of each call, by the call's id."""
        self.cut_characters = 0
        """Length of all arguments of calls that are not whole."""

    def say(self, role: str, text: str, place: str) -> None:
        """Add what the user, the system or the developer says, which stands at ``place`` in the request."""
        last = self._turns[-1] if self._turns else None
        leads = last is None or (last.role in _LEADING and len(self._turns) == 1)
        if role in _LEADING and not leads and not self._rules.late_system:
            role = "user"
        if last is not None and role in _LEADING and leads:
            last.texts.append(text)
            last.role = role if role == last.role else "system"
        elif last is not None and role == last.role == "user" and self._merges_users:
            last.texts.append(text)
        else:
            self._turns.append(_Turn(role, place, [text]))

    def think(self, text: str, place: str) -> None:
        """Add reasoning to the assistant's turn."""
        self._assistant(place).thoughts.append(text)

    def answer(self, text: str, place: str) -> None:
        """Add text to the assistant's turn."""
        self._assistant(place).texts.append(text)

    def call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        """Add a call to the assistant's turn."""
        turn = self._assistant(place)
        self._calls[call_id] = turn, name
        turn.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def has_call(self, call_id: str) -> bool:
        """Return whether there is a call of this id."""
        return call_id in self._calls

    def output(self, call_id: str, text: str, place: str) -> None:
        """Add the output of a call, which there is."""
        turn, name = self._calls[call_id]
        turn.outputs.append(({"role": "tool", "tool_call_id": call_id, "name": name, "content": text}, place))

    def messages(self) -> list[Message]:
        """Return all messages."""
        return [message for message, _ in self._all()]

    def places(self) -> list[str]:
        """Return the path in the request of what each message begins with."""
        return [place for _, place in self._all()]

    def _all(self) -> Iterator[tuple[Message, str]]:
        for turn in self._turns:
            yield turn.message(), turn.place
            yield from turn.outputs

    def _assistant(self, place: str) -> _Turn:
        """Return the assistant's turn at hand, which an output of one of its calls ends."""
        if not self._turns or self._turns[-1].role != "assistant" or self._turns[-1].outputs:
            self._turns.append(_Turn("assistant", place))
        return self._turns[-1]
