"""A progress that is not shown."""

from __future__ import annotations


def silent(_what: str, _done: int, _total: int) -> None:
    """Show no progress."""
