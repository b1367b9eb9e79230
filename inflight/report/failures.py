"""How a command fails: in one line, with code 1, and never with a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from inflight.errors import InflightError


@contextmanager
def one_line_errors(console: Console, needs: str) -> Iterator[None]:
    """Tell an error of what is within, and end.

    Args:
        console: of the standard error.
        needs: what must be installed, as the end of the sentence that says so.

    Raises:
        typer.Exit: there was an error.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed; {needs}"
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except InflightError as error:
        text = str(error)
    else:
        return
    console.print(f"inflight: {text}", style="red", markup=False, soft_wrap=not console.is_terminal)
    raise typer.Exit(1)
