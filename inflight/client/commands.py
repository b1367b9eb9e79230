"""The commands ``inflight chat`` and ``inflight generate``: one conversation, and many prompts at once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from inflight.client.aio import AsyncClient, AsyncHttpClient, ServedModel
from inflight.client.answer import Completion
from inflight.client.request import GenerateOptions
from inflight.client.retry import Retry
from inflight.client.sync import Client, HttpClient
from inflight.client.transport import is_http
from inflight.client.wrap import visible
from inflight.errors import InflightError, InvalidRequest, UnsupportedFeature

if TYPE_CHECKING:  # a terminal's libraries are loaded by the command that needs them, and not by the others
    from inflight.client.chat import Chat

_Url = Annotated[
    str, typer.Option(envvar="INFLIGHT_URL", help="host:port is gRPC (grpcs:// with TLS); http:// or https:// is HTTP.")
]
_Model = Annotated[str, typer.Option(help="Triton model to ask.")]
_MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate; by default the server's limit.")]
_Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 or absent: greedy.")]
_TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")]
_TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens whose sum reaches p.")]
_BeamWidth = Annotated[int | None, typer.Option(help="Beams of beam search; the best one's text is the answer.")]
_Seed = Annotated[int | None, typer.Option(help="Random seed.")]
_Stop = Annotated[list[str] | None, typer.Option(help="String that ends an answer; may be given several times.")]
_LOADING_S = 120.0
"""How long a command waits for a server that is there and still loads its model."""
_USUAL_COLUMNS = 80
"""The width of a terminal that does not know its own."""


def chat(
    url: _Url = "localhost:8001",
    model: _Model = "ensemble",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
    top_k: _TopK = None,
    top_p: _TopP = None,
    seed: _Seed = None,
    stop: _Stop = None,
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
        with kind(url, model=model, retry=Retry(resume=True)) as client:
            conversation = Chat(client, options, system, sys.stdout, notes, columns)
            with notes.status("waiting for the server"):
                client.check(_LOADING_S)
            served = client.served_model()
            conversation.sample_as(served)
            good = _talk(conversation, served) if sys.stdin.isatty() else _answer_input(conversation)
    except (InflightError, OSError) as error:
        _print_error(notes, error)
        good = False
    if not good:
        raise typer.Exit(1)


def _columns() -> int:
    """Return the terminal's width, which may change; COLUMNS in the environment does not follow it."""
    return os.get_terminal_size(sys.stdout.fileno()).columns or _USUAL_COLUMNS


def _talk(conversation: Chat, served: ServedModel | None) -> bool:
    """Answer messages until the user leaves."""
    from inflight.client.keyboard import QUOTES, Keyboard

    keyboard = Keyboard()
    conversation.greet(served)
    while True:
        try:
            message = keyboard.read()
            with keyboard.away():
                message = message.strip()
                if message.startswith(QUOTES):
                    conversation.ask(message.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"))
                else:
                    conversation.handle(message)
        except EOFError:
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


@dataclass
class Asker:
    """Asks prompts of one server.

    A prompt is asked as a chat of one message, so that the checkpoint's chat template is applied to it; a server whose
    checkpoint has none says so, and gets the text as it is.
    """

    client: AsyncClient | AsyncHttpClient
    options: GenerateOptions
    raw: bool = False
    """Whether no chat template is applied."""

    async def ask(self, prompt: str) -> Completion:
        """Return the answer to one prompt.

        Raises:
            InflightError: as ``AsyncClient.generate`` does.
        """
        if not self.raw:
            try:
                return await self.client.generate([{"role": "user", "content": prompt}], self.options)
            except (UnsupportedFeature, InvalidRequest) as error:
                # Ours without a template and upstream's ensemble refuse messages altogether.
                text = str(error)
                foreign = "unexpected inference input" in text and "messages" in text
                if not foreign and "no chat template" not in text:
                    raise
                self.raw = True
        return await self.client.generate(prompt, self.options)


@dataclass(frozen=True, slots=True)
class Result:
    """One prompt and its answer, or the error that it ended with."""

    index: int
    prompt: str
    answer: Completion | InflightError

    def as_json(self) -> str:
        """Return the result as one line of JSON."""
        row: dict[str, object] = {"index": self.index, "prompt": self.prompt}
        answer = self.answer
        if isinstance(answer, InflightError):
            row["error"] = {"status": answer.status, "message": str(answer)}
        else:
            row |= {
                "text": answer.text,
                "finish_reason": answer.finish_reason,
                "input_tokens": answer.usage.input_tokens,
                "output_tokens": answer.usage.output_tokens,
                "seconds": round(answer.seconds, 6),
            }
            if answer.alternatives:
                row["alternatives"] = [other.text for other in answer.alternatives]
        return json.dumps(row, ensure_ascii=False)


async def generate_all(
    asker: Asker, prompts: Sequence[str], concurrency: int, done: Callable[[], None] = lambda: None
) -> AsyncGenerator[Result, None]:
    """Yield a result for each prompt, in order, with at most ``concurrency`` requests running at a time.

    ``done`` is called whenever a prompt is answered, in whatever order that happens.
    """
    room = asyncio.Semaphore(concurrency)

    async def answer(index: int, prompt: str) -> Result:
        async with room:
            try:
                return Result(index, prompt, await asker.ask(prompt))
            except InflightError as error:
                return Result(index, prompt, error)
            finally:
                done()

    tasks = [asyncio.create_task(answer(index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; else one per line of --file or stdin.")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Prompts, one per line.")] = None,
    url: _Url = "localhost:8001",
    model: _Model = "ensemble",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 16,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSON object per prompt, errors included.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the checkpoint's chat template.")
    ] = False,
    max_tokens: _MaxTokens = None,
    temperature: _Temperature = None,
    top_k: _TopK = None,
    top_p: _TopP = None,
    beam_width: _BeamWidth = None,
    length_penalty: Annotated[float | None, typer.Option(help="Beams are ranked by log-prob / length ** this.")] = None,
    seed: _Seed = None,
    stop: _Stop = None,
) -> None:
    """Answer a prompt, or many at once, in their order; exit code 1 if any fails.

    Where the checkpoint has a chat template, a prompt is a user's message; else a text to continue.
    """
    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        beam_width=beam_width,
        length_penalty=length_penalty,
        seed=seed,
        stop_words=stop,
        return_num_input_tokens=jsonl or None,
        return_num_output_tokens=jsonl or None,
    )
    kind = AsyncHttpClient if is_http(url) else AsyncClient
    prompts = _prompts(prompt, file)
    try:
        asker = Asker(kind(url, model=model, retry=Retry(resume=True)), options, raw)
        failures = asyncio.run(_answer_all(asker, prompts, concurrency, jsonl))
    except (InflightError, OSError) as error:
        _print_error(Console(stderr=True), error)
        raise typer.Exit(1) from None
    if failures:
        raise typer.Exit(1)


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    if prompt is not None and file is not None:
        raise typer.BadParameter("give a prompt or --file, not both")
    if prompt is not None:
        return [prompt]
    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, --file, or lines on standard input")
    try:
        text = file.read_text(encoding="utf-8") if file else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"the prompts are not UTF-8: {error}") from error
    return [line.removesuffix("\r") for line in text.split("\n") if line.strip()]


async def _answer_all(asker: Asker, prompts: list[str], concurrency: int, jsonl: bool) -> int:
    """Write all answers and return how many prompts failed.

    Raises:
        InflightError: the server cannot be asked; no prompt was sent.
    """
    failures = 0
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=len(prompts) < 2 or not console.is_terminal)
    async with asker.client:
        await asker.client.check(_LOADING_S)
        with bar:
            task = bar.add_task("", total=len(prompts))
            results = generate_all(asker, prompts, concurrency, done=lambda: bar.advance(task))
            async with aclosing(results):
                async for result in results:
                    _write(result, jsonl)
                    failures += isinstance(result.answer, InflightError)
    return failures


def _write(result: Result, jsonl: bool) -> None:
    """Write one answer; a plain one that failed leaves an empty line, so that answers stay in step with prompts."""
    if jsonl:
        print(result.as_json(), flush=True)
    elif isinstance(result.answer, InflightError):
        print(flush=True)
        print(_shown(f"prompt {result.index + 1}: {result.answer.wire_message()}", sys.stderr), file=sys.stderr)
    else:
        print(_shown(result.answer.text, sys.stdout), flush=True)


def _shown(text: str, file: TextIO) -> str:
    """Return what is written of a text: a terminal must not obey what a model says, and a file must not lose it."""
    return visible(text) if file.isatty() else text


def _print_error(console: Console, error: InflightError | OSError) -> None:
    """Print an error as one line, which a terminal gets broken between its words.

    Raises:
        OSError: whoever read the output has gone, which is no error of the command's and not to be told.
    """
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        raise error
    reason = error.strerror if isinstance(error, OSError) and not error.filename else None
    text = f"inflight: {reason or error}"
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=not console.is_terminal)
