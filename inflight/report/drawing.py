"""How every plot looks: its type, its frame and its colours, on a light page and on a dark one.

Whatever draws takes its figures and colours from here. It knows nothing of what the plots show.
"""

from __future__ import annotations

import io
from html import escape
from typing import Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

PAPER, SHADE, INK, MUTED, FRAME, GRID = "#ffffff", "#f4f6f8", "#1d2329", "#4a5560", "#9aa5b1", "#e4e8ec"
BLUE, ORANGE, GREEN, PURPLE, YELLOW, GREY = "#35618f", "#b3541e", "#4f9d69", "#b05f9e", "#e0a83b", "#6b7680"
GOOD, BAD = "#2a7f4f", "#b3261e"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, GREY, "#7fb2d9", "#d99a7f", "#b5b35c", "#5d8f99")
"""Of the series of a plot, in their order."""
WIDTH = 9.5
"""Inches: the width of a figure that fills a page."""
_ON_DARK = {
    PAPER: "#0d1117",
    SHADE: "#161c23",
    INK: "#e6ebf0",
    MUTED: "#aab4be",
    FRAME: "#5b6670",
    GRID: "#262d35",
    BLUE: "#6ea8dc",
    ORANGE: "#e58a4e",
    GREEN: "#6cc08b",
    PURPLE: "#d38cc4",
    YELLOW: "#e8bd63",
    GREY: "#98a4b0",
    "#7fb2d9": "#a9d0ee",
    "#d99a7f": "#e9b9a4",
    "#b5b35c": "#cfce84",
    "#5d8f99": "#86bcc7",
    GOOD: "#5fc08c",
    BAD: "#f08a82",
}
"""What takes each colour's place where the reader prefers a dark page."""
_STYLE = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": "auto",
    "text.color": INK,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # the second is as wide as the first
    "axes.labelcolor": MUTED,
    "axes.edgecolor": FRAME,
    "axes.titlecolor": INK,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FRAME,
    "ytick.color": FRAME,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.prop_cycle": cycler(color=COLOURS),
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "inflight",  # equal figures give equal files
}


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """Return an empty figure of so many inches; what is drawn in this process from now on has the style."""
    matplotlib.rcParams.update(_STYLE)
    return Figure(figsize=(width, height), layout=layout)


def legend_above(axes: Axes, columns: int = 3) -> None:
    """Name what is drawn in a panel, above its right end."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=columns)


def svg(figure: Figure, title: str) -> str:
    """Return a figure as an SVG element that follows the reader's preference for a light or a dark page.

    Args:
        figure: made by ``new_figure``.
        title: what the picture shows, for those who cannot see it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return with_title(text[text.index("<svg") :], title, _dark_rules())


def with_title(picture: str, title: str, style: str) -> str:
    """Return an SVG element with a title and a style sheet as its first children."""
    head, inside = picture.split(">", 1)
    return f'{head} role="img">\n <title>{escape(title)}</title>\n <style>{style}</style>{inside}'


def _dark_rules() -> str:
    """Return the style sheet that changes the colours on a dark page; white text on a bar stays white.

    A heat map is a raster, whose palest colour is that of a light page: there light and dark change places.
    """
    rules = ["image{filter:invert(1) hue-rotate(180deg)}"]
    for light, dark in _ON_DARK.items():
        filled = ":not(text)" if light == PAPER else ""
        rules.append(f'{filled}[style*="fill: {light}"]{{fill:{dark}!important}}')
        rules.append(f'[style*="stroke: {light}"]{{stroke:{dark}!important}}')
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"
