"""HTML pages that stand alone: headings, text, tables and plots in one file, readable without a network.

It knows how a page looks; not what its numbers mean.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment
from matplotlib import rc_context
from matplotlib.figure import Figure

Row = Mapping[str, object]

_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2329; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
.lead { color: #4a5560; margin-top: 0; }
.verdict { padding: .5rem .8rem; border-left: .3rem solid; background: #f4f6f8; }
.good { border-color: #2a7f4f; } .bad { border-color: #b3261e; }
.scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .9rem; } th, td { padding: .25rem .7rem; text-align: right; }
th { border-bottom: 1px solid #9aa5b1; font-weight: 600; } td { border-bottom: 1px solid #e4e8ec; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } footer { color: #6b7680; font-size: .85rem; margin-top: 2rem; }
</style></head><body>
<h1>{{ title }}</h1><p class="lead">{{ lead }}</p>
{% for section in sections %}
{% if section.title %}<h2>{{ section.title }}</h2>{% endif %}
{% if section.text %}<p{% if section.verdict is not none %} class="verdict {{ 'good' if section.verdict else 'bad' }}"{% endif %}>{{ section.text }}</p>{% endif %}
{% if section.table %}<div class="scroll"><table><thead><tr>
{%- for name in section.table[0] %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in section.table %}<tr>{% for value in row.values() %}<td>{{ value | cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}
{% if section.figure %}<div class="scroll">{{ section.figure | svg | safe }}</div>{% endif %}
{% endfor %}
<footer>{{ footer }}</footer></body></html>
"""


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
    return environment.from_string(_TEMPLATE).render(title=title, lead=lead, sections=sections, footer=footer)


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
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "inflight"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
