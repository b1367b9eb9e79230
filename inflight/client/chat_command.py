"""The command ``inflight chat``: options, the terminal and the exit code, nothing else."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from inflight.client.address import is_http
from inflight.client.failure import print_error
from inflight.client.options import LOADING_S, MaxTokens, Model, Seed, Stop, Temperature, TopK, TopP, Url
from inflight.client.request import GenerateOptions
from inflight.client.sync import Client, HttpClient
from inflight.errors import InflightError

if TYPE_CHECKING:  # a terminal's libraries are loaded by the command that needs them, and not by the others
    from inflight.client.chat import Chat
_USUAL_COLUMNS = 80
"""Of a terminal that does not know its width."""


def chat(
    url: Url = "localhost:8001",
    model: Model = "ensemble",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Talk with the model; /help lists the commands. What is piped in is one message, and gets one answer."""
    from inflight.client.chat import Chat

    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_words=stop,
        return_num_output_tokens=True,
    )
    notes = Console(stderr=True)
    kind = HttpClient if is_http(url) else Client
    columns = _columns if sys.stdout.isatty() else None
    try:
        with kind(url, model=model) as client:
            conversation = Chat(client, options, system, sys.stdout, notes, columns)
            _wait_for(client, notes)
            good = _talk(conversation, client) if sys.stdin.isatty() else _answer_input(conversation)
    except (InflightError, OSError) as error:
        print_error(notes, error)
        good = False
    if not good:
        raise typer.Exit(1)


def _columns() -> int:
    """Return the terminal's width, which may change; COLUMNS in the environment does not follow it."""
    return os.get_terminal_size(sys.stdout.fileno()).columns or _USUAL_COLUMNS


def _wait_for(client: Client | HttpClient, notes: Console) -> None:
    """Return when the server can be asked; one that loads its model is waited for.

    Raises:
        InflightError: there is none; the message is one line that says what to do.
    """
    with notes.status("waiting for the server"):
        client.check(LOADING_S)


def _talk(conversation: Chat, client: Client | HttpClient) -> bool:
    """Answer messages until the user leaves."""
    from inflight.client.chat import Leave
    from inflight.client.keyboard import Keyboard, unquoted

    keyboard = Keyboard()
    conversation.greet(client.served_model())
    while True:
        try:
            message = keyboard.read()
            with keyboard.away():
                if message.lstrip().startswith('"""'):
                    conversation.ask(unquoted(message))
                else:
                    conversation.handle(message.strip())
        except (EOFError, Leave):
            return True
        except KeyboardInterrupt:
            conversation.note("Ctrl-D or /exit leaves")


def _answer_input(conversation: Chat) -> bool:
    """Answer all of standard input as one message."""
    try:
        question = sys.stdin.read().strip()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8: {error}") from error
    if not question:
        raise typer.BadParameter("standard input is empty; where it is not a terminal, it holds the message")
    answer = conversation.answer(question)
    return answer is not None and answer.finish_reason is not None
