"""``inflight demo``: start the demo, ask it three questions through the ensemble, show the streamed answers, stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inflight.client import Client, GenerateOptions
from inflight.load.run_command import target_at
from inflight.report.failures import one_line_errors
from inflight.resources import DEMO

QUESTIONS = ("What is in-flight batching?", "Why does time to first token matter?", "What is Inflight?")
_console = Console(highlight=False)


def demo(
    directory: Annotated[Path, typer.Argument(help="Deployment directory.")] = DEMO,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 120,
) -> None:
    """Serve a deployment on free ports, ask three questions, show answers and speeds, and stop."""
    started = time.monotonic()
    with one_line_errors(_console), target_at(None, directory, None, http=False) as target:
        _console.print(f"ready in {time.monotonic() - started:.1f} s", style="dim")
        with Client(target.url) as client:
            for question in QUESTIONS:
                _ask(client, question, max_tokens)


def _ask(client: Client, question: str, max_tokens: int) -> None:
    """Ask one question and show its answer as it comes, with TTFT and tokens per second."""
    _console.print(f"\n> {question}", style="bold", markup=False)
    options = GenerateOptions(max_tokens=max_tokens, return_num_output_tokens=True)
    with client.stream([{"role": "user", "content": question}], options) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        answer = stream.completion()
    tokens = answer.usage.output_tokens or 0
    decoding = answer.seconds - (answer.first_chunk_seconds or 0)
    speed = (tokens - 1) / decoding if tokens > 1 and decoding > 0 else 0.0
    first = 1000 * (answer.first_chunk_seconds or 0)
    _console.print(f"\nTTFT {first:.0f} ms, {speed:.0f} tokens/s, {tokens} tokens, {answer.finish_reason}", style="dim")
