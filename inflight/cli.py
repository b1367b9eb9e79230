"""The ``inflight`` command."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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


class _Commands(TyperGroup):
    """All commands: what the system refuses one of them, such as to write to a full disk, is told in one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read the output has seen enough
            raise
        except OSError as error:
            what = f"{error.filename}: " if error.filename else ""
            typer.echo(f"inflight: {what}{error.strerror or error}", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is not written yet cannot be
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    help="LLM serving on Triton Inference Server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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
    _set_up_streams()


def _set_up_streams() -> None:
    """What the terminal's encoding lacks is shown by its number; input that is not in that encoding is an error.

    A process may be started without any of the three.
    """
    sys.stdin = sys.stdin or io.StringIO()
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


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
