"""A conversation in a terminal: keeps the messages, streams each answer, obeys a few slash commands.

Knows nothing of how lines are read; answers go to ``out``, everything about them to ``notes``.
"""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console

from inflight.client.answer import Completion
from inflight.client.request import GenerateOptions
from inflight.client.sync import Client, HttpClient
from inflight.errors import InflightError, nearest

HELP = """/system TEXT   set the system message and start anew (without TEXT: show it)
/reset         forget the conversation
/help          show this
Ctrl-C cancels an answer, Ctrl-D leaves."""


class Chat:
    """One conversation. Every line is a turn of the user's, or a command when it begins with a slash."""

    def __init__(
        self, client: Client | HttpClient, options: GenerateOptions, system: str, out: TextIO, notes: Console
    ) -> None:
        self._client = client
        self._options = options
        self._system = system
        self._out = out
        self._notes = notes
        self.turns: list[dict[str, Any]] = []
        self.failed = False
        """Whether any turn ended with an error."""

    def handle(self, line: str) -> None:
        """Act on one line of input."""
        command, _, argument = line.strip().partition(" ")
        commands = {"/system": self._set_system, "/reset": self._reset, "/help": lambda _: self._note(HELP)}
        if command in commands:
            commands[command](argument.strip())
        elif command.startswith("/"):
            self._note(f"no command {command}{nearest(command, commands)}; /help lists them")
        elif command:
            self._answer(line.strip())

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
            self._reset("")
        else:
            self._note(self._system or "no system message")

    def _reset(self, _: str) -> None:
        self.turns.clear()
        self._note("new conversation")

    def _answer(self, question: str) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        turn = {"role": "user", "content": question}
        try:
            answer = self._stream([*system, *self.turns, turn])
        except InflightError as error:
            self.failed = True
            self._note(error.wire_message(), style="red")
            return
        if answer.text:  # a question without an answer would upset chat templates that want the roles to alternate
            self.turns += [turn, {"role": "assistant", "content": answer.text}]
        self._note(summary(answer))

    def _stream(self, messages: list[dict[str, Any]]) -> Completion:
        with self._client.stream(messages, self._options) as stream:
            try:
                for chunk in stream:
                    self._out.write(chunk.text)
                    self._out.flush()
            except KeyboardInterrupt:
                stream.cancel()
            finally:
                self._out.write("\n")
                self._out.flush()
            return stream.completion()

    def _note(self, text: str, style: str = "dim") -> None:
        self._notes.print(text, style=style, markup=False, highlight=False)


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
