"""Tables: rows with equal keys, in a terminal or on a page. It knows how a value is written, not what it means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inflight.report.units import significant

Row = Mapping[str, object]
"""The values of one row by the columns' headings."""
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)? ?%?$")
"""A text that is aligned as numbers are."""
_LONG = 40
"""Characters from which on a text may go over several lines."""


def columns(rows: Sequence[Row]) -> dict[str, str]:
    """Return the columns of a page's table, each with the page's class for its heading and its cells.

    Words are aligned to the left, and long ones may break; numbers are aligned to the right. The first column names the
    rows, and is text.
    """
    found = {}
    for place, name in enumerate(rows[0]):
        is_long = any(isinstance(row[name], str) and len(str(row[name])) > _LONG for row in rows)
        is_text = place == 0 or _is_text(rows, name)
        found[name] = "text" + " long" * is_long if is_text else ""
    return found


def cell(value: object) -> str:
    """Return a value as people read it: thousands apart, five significant digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.5g}"
    return str(value)


def figure(value: float | None) -> str:
    """Return a measured or computed value inside a sentence: four significant digits, or all before the point."""
    return cell(significant(value))


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Show rows in the terminal; an underscore in a heading ends its line. All else is shown as it is written."""
    table = Table(title=Text(title, style="table.title"), box=SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    for name in rows[0]:
        table.add_column(
            Text(name.replace("_", "\n")), justify="left" if _is_text(rows, name) else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row.values()))
    # Wide enough for every column, also where the output is a file or a pipe.
    needed = Console(width=1_000).measure(table).maximum
    Console(width=max(Console().width, needed)).print(table)


def _is_text(rows: Sequence[Row], name: str) -> bool:
    """Return whether a column has words."""
    texts = [row[name] for row in rows if isinstance(row[name], str) and row[name]]
    return not all(_NUMBER.match(str(text)) for text in texts)
