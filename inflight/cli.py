"""The ``inflight`` command."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from inflight.bench.commands import engine, headlines, recovery, scheduler, soak, soak_server
from inflight.bench.hostile.command import hostile
from inflight.client.chat_command import chat
from inflight.client.generate_command import generate
from inflight.export.build.commands import build
from inflight.export.plan.commands import plan
from inflight.load.commands import bench
from inflight.load.demo import demo
from inflight.load.group import load
from inflight.monitoring.commands import dashboards
from inflight.observe.profile import profile
from inflight.observe.top import top
from inflight.resources import VERSION
from inflight.serve.command import serve

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is told by us, in one line, and not by the library too

app = typer.Typer(help="LLM serving on Triton Inference Server.", no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"inflight {VERSION}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """LLM serving on Triton Inference Server."""


app.command()(serve)
app.command()(demo)
app.command()(chat)
app.command()(generate)
app.command()(build)
app.command()(plan)
app.command()(top)
app.command()(profile)
app.command()(dashboards)
bench.command()(engine)
bench.command()(headlines)
bench.command()(scheduler)
bench.command()(soak)
bench.command()(hostile)
bench.command()(recovery)
bench.command()(soak_server)
app.add_typer(bench, name="bench")
app.add_typer(load, name="load")
