"""Tests of tables: one test for all rows, which lists every row that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each_row(
    names: str | Sequence[str], rows: Iterable[Any], ids: Callable[[Any], str] = repr
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make one test of a function that checks one row; it takes the arguments of ``pytest.mark.parametrize``.

    Every row is checked, whatever becomes of the others, in the same process and with the same fixtures. The failure
    has a paragraph for each row that failed: its values, each by ``ids``, and what was wrong.

    Args:
        names: The function's parameters that a row gives values to; the others are fixtures.
        rows: A tuple of values for each row, or the value itself where there is one name.
        ids: Returns how a value is shown.
    """
    one = isinstance(names, str) and "," not in names
    named = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [(row,) if one else tuple(row) for row in rows]

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        assert table, f"{check.__name__} has no rows"

        @functools.wraps(check)
        def test(**fixtures: Any) -> None:
            failed = []
            for row in table:
                try:
                    check(**fixtures, **dict(zip(named, row, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    shown = ", ".join(f"{name}={ids(value)}" for name, value in zip(named, row, strict=True))
                    failed.append(f"{shown}\n    {type(error).__name__}: {error}")
            if failed:
                pytest.fail(f"{len(failed)} of {len(table)} rows:\n" + "\n".join(failed), pytrace=False)

        signature = inspect.signature(check)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in named]
        test.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return decorate
