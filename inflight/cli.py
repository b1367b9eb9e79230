"""The ``inflight`` command."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from inflight.resources import VERSION

_COMMANDS = {
    "serve": "inflight.serve.command",
    "door": "inflight.serve.door_command",
    "models": "inflight.export.models",
    "pull": "inflight.hub.commands",
    "pack": "inflight.hub.commands",
    "unpack": "inflight.hub.commands",
    "demo": "inflight.load.demo",
    "chat": "inflight.client.commands",
    "generate": "inflight.client.commands",
    "build": "inflight.export.build.commands",
    "plan": "inflight.export.plan.commands",
    "top": "inflight.top.top",
    "load": "inflight.load.group",
}
"""Which module has each command, by its own name. What is not asked for is not imported: all of them take a second."""


class _Commands(TyperGroup):
    """All commands: what the system refuses one of them, such as to write to a full disk, is told in one line."""

    commands: Any
    """The commands by their names; None: not asked for yet."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _COMMANDS and self.commands[cmd_name] is None:
            found = getattr(import_module(_COMMANDS[cmd_name]), cmd_name)
            if isinstance(found, typer.Typer):
                self.commands[cmd_name] = typer.main.get_group(found)
                self.commands[cmd_name].name = cmd_name
            else:
                alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
                alone.command(cmd_name)(found)
                self.commands[cmd_name] = typer.main.get_command(alone)
        return self.commands.get(cmd_name)

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
    cls=_Commands, help="LLM serving on Triton Inference Server.", no_args_is_help=True, pretty_exceptions_enable=False
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
    # A character that the terminal's encoding lacks is shown by its number; input in another encoding is an error. A
    # process may be started without any of the three.
    sys.stdin = sys.stdin or io.StringIO()
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def import_command(words: Sequence[str]) -> None:
    """Import what the words of a command line name first."""
    if words and words[0] in _COMMANDS:
        import_module(_COMMANDS[words[0]])
