"""``inflight demo``: start the demo, ask it three questions through the ensemble, show the streamed answers, stop."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inflight.client import Client, GenerateOptions
from inflight.client.chat import Chat, summary
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
    options = GenerateOptions(max_tokens=max_tokens, return_num_output_tokens=True)
    with one_line_errors(_console), target_at(None, directory, None, http=False) as target:
        _console.print(f"ready in {time.monotonic() - started:.1f} s", style="dim")
        with Client(target.url) as client:
            for question in QUESTIONS:
                _console.print(f"\n> {question}", style="bold", markup=False)
                chat = Chat(client, options, "", sys.stdout, _console)
                if (answer := chat.answer(question)) is None:
                    raise typer.Exit(1)
                chat.note(summary(answer))
