"""HTML pages that stand alone: headings, text, tables and plots in one file, readable without a network.

It knows how a page looks; not what its numbers mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from inflight.report.plots import Plot
from inflight.report.table import Row, cell, columns

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Section:
    """A part of a page; what is empty is left out."""

    title: str = ""
    text: str = ""
    table: Sequence[Row] = ()
    """Rows with equal keys, which are the columns' headings."""
    plot: Plot | None = None
    verdict: bool | None = None
    """Whether the text is good or bad news, and marked so; None: it is neither."""


def render_page(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """Return the HTML text of a page; everything in it is escaped."""
    environment = Environment(autoescape=True, trim_blocks=True)
    environment.filters |= {"cell": cell, "columns": columns, "svg": _picture}
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=title, lead=lead, sections=sections, footer=footer
    )


def _picture(plot: Plot, title: str) -> str:
    from inflight.report.drawing import draw, svg  # Matplotlib takes a second, and most commands draw nothing

    return svg(draw(plot), title)
