"""How a command fails: in one line, with code 1, and never with a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from inflight.errors import InflightError
from inflight.resources import how_to_install

EXTRAS = {
    "torch": "engine",
    "safetensors": "engine",
    "modelopt": "build",
    "scipy": "build",
    "transformers": "build",
    "triton": "dev",
}
"""The optional dependencies that commands import, each with the extra that brings it."""


def missing(error: ModuleNotFoundError) -> str:
    """Return what is not installed, and what brings it."""
    extra = EXTRAS.get(str(error.name).partition(".")[0])
    return f"{error.name} is not installed" + (f"; it comes with: {how_to_install(extra)}" if extra else "")


@contextmanager
def one_line_errors(console: Console) -> Iterator[None]:
    """Tell an error of what is within on ``console``, that of the standard error, and end.

    Raises:
        typer.Exit: there was an error.
        BrokenPipeError: whoever read the output has gone, which is not to be told.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        text = missing(error)
    except BrokenPipeError:  # whoever read the output has seen enough
        raise
    except OSError as error:
        what = f"{error.filename}: " if error.filename else ""
        text = f"{what}{error.strerror or error}"
    except InflightError as error:
        text = str(error)
    else:
        return
    console.print(f"inflight: {text}", style="red", markup=False, soft_wrap=not console.is_terminal)
    raise typer.Exit(1)
