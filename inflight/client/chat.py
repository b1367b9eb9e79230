"""A conversation in a terminal: keeps the messages, streams each answer, obeys a few slash commands.

Knows nothing of how messages are read; answers go to ``out``, everything about them to ``notes``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from rich.console import Console

from inflight.client.aio import ServedModel
from inflight.client.answer import Completion
from inflight.client.errors import ServerUnreachable
from inflight.client.request import GenerateOptions
from inflight.client.sync import Client, HttpClient
from inflight.client.wrap import Wrapper
from inflight.errors import InflightError, InvalidRequest, UnsupportedFeature, nearest

COMMANDS = {
    "/clear": "forget the conversation and begin a new one",
    "/system TEXT": "set the system message and begin anew; without TEXT: show it",
    "/help": "show this",
    "/exit": "leave; so do /quit and Ctrl-D",
}
KEYS = {
    '"""': "begins a text of several lines, up to the next one",
    "Alt-Enter": "begins another line",
    "Ctrl-C": "ends an answer",
}
_COMMAND = re.compile(r"/\w*")
_CHOOSING = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Options that say how tokens are chosen."""
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Options that a model may have defaults for."""


@dataclass
class Chat:
    """One conversation. Every message is a turn of the user's, or a command when it begins with a slash."""

    client: Client | HttpClient
    options: GenerateOptions
    system: str
    """The system message; empty: none."""
    out: TextIO
    """It gets the answers' text."""
    notes: Console
    """It gets what is said about them."""
    columns: Callable[[], int] | None = None
    """Returns the width that answers are wrapped at; None: they are not."""
    turns: list[dict[str, Any]] = field(default_factory=list)

    def sample_as(self, served: ServedModel | None) -> None:
        """Sample as the model's makers do, where no option says how; the gateway does the same."""
        given = (getattr(self.options, name) for name in _CHOOSING)
        if served is not None and all(value is None for value in given):
            known = {name: value for name, value in served.sampling_defaults.items() if name in _DEFAULTS}
            self.options = replace(self.options, **known)  # type: ignore[arg-type]

    def greet(self, served: ServedModel | None) -> None:
        """Say what is at the other end, and how to leave."""
        if served is not None:
            context = f", {served.max_sequence_length:,} tokens of context" if served.max_sequence_length else ""
            self.notes.print(f"{served.name}{context}", style="bold", markup=False, highlight=False)
        longest = self.options.max_tokens or (served.default_max_tokens if served else None)
        limit = f"; answers have at most {longest:,} tokens (--max-tokens)" if longest else ""
        self.note(f"{self.client.url}{limit}")
        self.note('/help lists the commands, """ begins a text of several lines, /exit or Ctrl-D leaves')

    def handle(self, message: str) -> None:
        """Act on one line of a user's.

        Raises:
            EOFError: it asks to leave, as Ctrl-D does.
        """
        command, _, argument = message.partition(" ")
        if "\n" in message or not _COMMAND.fullmatch(command):
            if message:
                self.ask(message)
        elif command == "/system" and not argument.strip():
            self.note(self.system or "no system message")
        elif command in ("/system", "/clear"):
            if command == "/system":
                self.system = argument.strip()
            self.turns.clear()
            self.note("new conversation")
        elif command in ("/exit", "/quit"):
            raise EOFError
        else:
            known = [*(name.split()[0] for name in COMMANDS), "/quit"]
            if command != "/help":
                self.note(f"no command {command}{nearest(command, known)}; these are there:")
            for name, meaning in (COMMANDS | KEYS).items():
                self.note(f"  {name:<14}{meaning}")

    def ask(self, question: str) -> None:
        """Answer a question, whatever it begins with, and say how fast that was."""
        if answer := self.answer(question):
            self.note(summary(answer))

    def answer(self, question: str) -> Completion | None:
        """Answer a question and return the answer; None: there was an error, which has been told."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        turn = {"role": "user", "content": question}
        try:
            answer = self._stream([*system, *self.turns, turn])
        except InflightError as error:
            self.note(self._what_went_wrong(error), style="red")
            return None
        if answer.text:  # a question without an answer would upset chat templates that want the roles to alternate
            self.turns += [turn, {"role": "assistant", "content": answer.text}]
        return answer

    def _stream(self, messages: list[dict[str, Any]]) -> Completion:
        wrapper = None if self.columns is None else Wrapper(self.columns)
        with self.client.stream(messages, self.options) as stream:
            try:
                for chunk in stream:
                    print(wrapper.feed(chunk.text) if wrapper else chunk.text, end="", file=self.out, flush=True)
            except KeyboardInterrupt:
                stream.cancel()
            finally:
                answer = stream.completion()
                rest = wrapper.end() if wrapper else ""
                if answer.text and not answer.text.endswith("\n"):
                    rest += "\n"
                print(rest, end="", file=self.out, flush=True)
            return answer

    def _what_went_wrong(self, error: InflightError) -> str:
        """Return an error as one line, with what to do about it where that is known."""
        if isinstance(error, ServerUnreachable):
            return str(self.client.problem() or f"the connection to {self.client.url} broke; ask again")
        text = " ".join(str(error).split())
        if isinstance(error, UnsupportedFeature) and "chat template" in text:
            return "this model has no chat template; `inflight generate` continues a text without one"
        if isinstance(error, InvalidRequest) and self.turns:
            return f"{text}; /clear begins a new conversation"
        return text

    def note(self, text: str, style: str = "dim") -> None:
        """Say something about the conversation."""
        self.notes.print(text, style=style, markup=False, highlight=False)


def summary(answer: Completion) -> str:
    """Return one line about an answer: time to the first token, tokens and their rate, and why it ended."""
    parts = []
    if answer.first_chunk_seconds is not None:
        parts.append(f"first token {answer.first_chunk_seconds * 1000:.0f} ms")
    if tokens := answer.usage.output_tokens:
        parts.append(f"{tokens} tokens")
        after_first = answer.seconds - (answer.first_chunk_seconds or 0.0)
        if tokens > 1 and after_first > 0:
            parts.append(f"{(tokens - 1) / after_first:.1f} tokens/s")
    return " · ".join([*parts, answer.finish_reason or "cancelled"])
