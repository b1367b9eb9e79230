"""The ``inflight`` command."""

from __future__ import annotations

import typer

from inflight.client.commands import chat, generate
from inflight.load.commands import bench
from inflight.load.demo import demo
from inflight.serve.command import serve

app = typer.Typer(help="LLM serving on Triton Inference Server.", no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(serve)
app.command()(demo)
app.command()(chat)
app.command()(generate)
app.add_typer(bench, name="bench")
