"""HTML pages that stand alone: headings, text, tables and plots in one file, readable without a network.

It knows how a page looks; not what its numbers mean.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment

if TYPE_CHECKING:  # most commands, and a server, draw nothing
    from matplotlib.figure import Figure

Row = Mapping[str, object]
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
    environment.filters["svg"] = svg
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=title, lead=lead, sections=sections, footer=footer
    )


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


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element; its text stays text, and equal figures give equal files."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "inflight"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
