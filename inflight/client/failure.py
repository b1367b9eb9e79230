"""How a command of the clients' tells what stopped it."""

from __future__ import annotations

from rich.console import Console

from inflight.errors import InflightError


def print_error(console: Console, error: InflightError) -> None:
    """Print an error as one line, which a terminal gets broken between its words."""
    text = f"inflight: {error}"
    console.print(text, style="red", markup=False, highlight=False, soft_wrap=not console.is_terminal)
