"""The commands ``inflight chat`` and ``inflight generate``: options, terminals and exit codes, nothing else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from inflight.client.aio import AsyncClient, AsyncHttpClient
from inflight.client.bulk import Result, generate_all
from inflight.client.chat import Chat
from inflight.client.request import GenerateOptions
from inflight.client.sync import Client, HttpClient

Url = Annotated[
    str,
    typer.Option(envvar="INFLIGHT_URL", help="host:port is gRPC (grpcs:// with TLS); http:// or https:// is HTTP."),
]
Model = Annotated[str, typer.Option(help="Triton model to ask.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate; by default the server's limit.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 or absent: greedy.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens whose sum reaches p.")]
BeamWidth = Annotated[int | None, typer.Option(help="Beams of beam search; the best one's text is the answer.")]
LengthPenalty = Annotated[float | None, typer.Option(help="Beams are ranked by log-prob / length ** this.")]
Seed = Annotated[int | None, typer.Option(help="Random seed.")]
Stop = Annotated[list[str] | None, typer.Option(help="String that ends an answer; may be given several times.")]


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
    """Talk with the model: every line is a turn; /help lists the commands. Reads piped lines too."""
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
    with kind(url, model=model) as client:
        conversation = Chat(client, options, system, sys.stdout, notes)
        for line in _lines(notes):
            conversation.handle(line)
    if conversation.failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; else one per line of --file or stdin.")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Prompts, one per line.")] = None,
    url: Url = "localhost:8001",
    model: Model = "ensemble",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 16,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSON object per prompt, errors included.")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    beam_width: BeamWidth = None,
    length_penalty: LengthPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Answer a prompt, or many at once; answers come in the prompts' order. Exit code 1 if any prompt fails."""
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
    client = kind(url, model=model)
    failures = asyncio.run(_answer_all(client, _prompts(prompt, file), options, concurrency, jsonl))
    if failures:
        raise typer.Exit(1)


def is_http(url: str) -> bool:
    """Return whether ``url`` asks for HTTP."""
    return url.startswith(("http://", "https://"))


def _lines(notes: Console) -> Iterator[str]:
    """Yield lines of input until its end."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() editing and a history)
    while True:
        try:
            yield input("> " if interactive else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            notes.print("\nCtrl-D leaves", style="dim")


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


async def _answer_all(
    client: AsyncClient | AsyncHttpClient, prompts: list[str], options: GenerateOptions, concurrency: int, jsonl: bool
) -> int:
    """Write all answers and return how many prompts failed."""
    failures = 0
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=len(prompts) < 2 or not console.is_terminal)
    async with client:
        with bar:
            task = bar.add_task("", total=len(prompts))
            results = generate_all(client, prompts, options, concurrency, done=lambda: bar.advance(task))
            async with aclosing(results):
                async for result in results:
                    _write(result, jsonl)
                    failures += result.error is not None
    return failures


def _write(result: Result, jsonl: bool) -> None:
    """Write one answer; a plain one that failed leaves an empty line, so that answers stay in step with prompts."""
    if jsonl:
        print(result.as_json(), flush=True)
        return
    print(result.completion.text if result.completion else "", flush=True)
    if result.error is not None:
        print(f"prompt {result.index + 1}: {result.error.wire_message()}", file=sys.stderr)
