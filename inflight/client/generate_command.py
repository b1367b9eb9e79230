"""The command ``inflight generate``: options, the terminal and the exit code, nothing else."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from inflight.client.address import is_http
from inflight.client.aio import AsyncClient, AsyncHttpClient
from inflight.client.bulk import Asker, Result, generate_all
from inflight.client.failure import print_error
from inflight.client.options import (
    LOADING_S,
    BeamWidth,
    LengthPenalty,
    MaxTokens,
    Model,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    Url,
)
from inflight.client.request import GenerateOptions
from inflight.client.wrap import visible
from inflight.errors import InflightError


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; else one per line of --file or stdin.")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Prompts, one per line.")] = None,
    url: Url = "localhost:8001",
    model: Model = "ensemble",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 16,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSON object per prompt, errors included.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the checkpoint's chat template.")
    ] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    beam_width: BeamWidth = None,
    length_penalty: LengthPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
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
        client = kind(url, model=model)
        failures = asyncio.run(_answer_all(client, Asker(client, options, raw), prompts, concurrency, jsonl))
    except (InflightError, OSError) as error:
        print_error(Console(stderr=True), error)
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


async def _answer_all(
    client: AsyncClient | AsyncHttpClient, asker: Asker, prompts: list[str], concurrency: int, jsonl: bool
) -> int:
    """Write all answers and return how many prompts failed.

    Raises:
        InflightError: the server cannot be asked; no prompt was sent.
    """
    failures = 0
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=len(prompts) < 2 or not console.is_terminal)
    async with client:
        await client.check(LOADING_S)
        with bar:
            task = bar.add_task("", total=len(prompts))
            results = generate_all(asker, prompts, concurrency, done=lambda: bar.advance(task))
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
    print(_shown(result.completion.text if result.completion else "", sys.stdout), flush=True)
    if result.error is not None:
        print(_shown(f"prompt {result.index + 1}: {result.error.wire_message()}", sys.stderr), file=sys.stderr)


def _shown(text: str, file: TextIO) -> str:
    """Return what is written of a text: a terminal must not obey what a model says, and a file must not lose it."""
    return visible(text) if file.isatty() else text
