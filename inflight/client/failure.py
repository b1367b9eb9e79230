"""How a command of the clients' tells what stopped it."""

from __future__ import annotations

import errno

from rich.console import Console

from inflight.errors import InflightError


def print_error(console: Console, error: InflightError | OSError) -> None:
    """Print an error as one line, which a terminal gets broken between its words.

    Raises:
        OSError: whoever read the output has gone, which is no error of the command's and not to be told.
    """
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        raise error
    reason = error.strerror if isinstance(error, OSError) and not error.filename else None
    text = f"inflight: {reason or error}"
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=not console.is_terminal)
