"""HTML pages that stand alone: headings, text, tables and plots in one file, readable without a network.

It knows how a page looks; not what its numbers mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment

if TYPE_CHECKING:  # most commands, and a server, draw nothing
    from matplotlib.figure import Figure

Row = Mapping[str, object]
_NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)? ?%?$")
"""A text that is aligned as numbers are."""
_LONG = 40
"""Characters from which on a text may go over several lines."""
_TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Section:
    """A part of a page; what it has not is left out."""

    title: str = ""
    text: str = ""
    table: Sequence[Row] = ()
    """Rows with equal keys, which are the columns' headings."""
    figure: Figure | None = None
    verdict: bool | None = None
    """True or False: mark the text as good or bad news."""


def render_page(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """Return the HTML text of a page; everything in it is escaped."""
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters["cell"] = cell
    environment.filters["columns"] = _columns
    environment.filters["svg"] = _picture
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=title, lead=lead, sections=sections, footer=footer
    )


@dataclass(frozen=True)
class _Column:
    """How a table's column is aligned: numbers to the right, words to the left, in the heading as in each row."""

    name: str
    is_text: bool
    is_long: bool


def _columns(table: Sequence[Row]) -> list[_Column]:
    found = []
    for place, name in enumerate(table[0]):
        texts = [str(row[name]) for row in table if isinstance(row[name], str) and row[name]]
        is_text = place == 0 or not all(map(_NUMBER.match, texts))
        found.append(_Column(name, is_text, is_text and any(len(text) > _LONG for text in texts)))
    return found


def cell(value: object) -> str:
    """Return a table's value as people read it: thousands apart, five significant digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.5g}"
    return str(value)


def _picture(figure: Figure, title: str) -> str:
    from inflight.report.drawing import svg  # a page without a figure needs nothing that draws

    return svg(figure, title)
