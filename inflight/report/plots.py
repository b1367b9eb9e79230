"""Plots as data: what a picture shows. ``drawing`` decides how it looks, and is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

PAPER, INK, MUTED, FRAME, GRID = "#ffffff", "#1d2329", "#4a5560", "#9aa5b1", "#e4e8ec"
BLUE, ORANGE, GREEN, PURPLE, YELLOW, GREY = "#35618f", "#b3541e", "#4f9d69", "#b05f9e", "#e0a83b", "#6b7680"
GOOD, BAD = "#2a7f4f", "#b3261e"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, GREY, "#7fb2d9", "#d99a7f", "#b5b35c", "#5d8f99")
"""The colours of a plot's series, in their order."""
ON_DARK = {
    PAPER: "#0d1117",
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
"""The colour that takes each one's place where the reader prefers a dark page."""

Values = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Line:
    """One series of a panel: a curve, a cloud of points, or bars."""

    x: Values
    y: Values
    colour: str = BLUE
    name: str = ""
    """The name in the legend; series with the same name share an entry, and one without a name has none."""
    shape: Literal["line", "dotted", "steps", "points", "bars"] = "line"
    marker: str = ""
    """Matplotlib's name of the mark at each point."""
    hollow: Sequence[bool] = ()
    """Which points are drawn as rings; empty: none."""
    labels: Sequence[str] = ()
    """What is written beside each point, where there is room; empty: nothing."""


@dataclass(frozen=True)
class Mark:
    """A straight line across a panel."""

    at: float
    """The value on the axis that it stands on."""
    name: str = ""
    colour: str = INK
    style: str = "--"
    """Matplotlib's name of the line style."""
    axis: Literal["x", "y"] = "x"


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    shaded: tuple[float, float, str] | None = None
    """A range of x that is shaded, and its name."""
    x_limits: tuple[float | None, float | None] = (0, None)
    y_limits: tuple[float | None, float | None] = (0, None)
    """The lowest and the highest value shown; None: as the data needs."""
    log_x: bool = False
    """Whether the x-axis is logarithmic, to the base of 2."""
    log_y: bool = False
    """Whether the y-axis is logarithmic where the values differ much."""
    y_names: Sequence[str] = ()
    """Names in place of the numbers 0, 1, ... on the y-axis, from the top down."""


@dataclass(frozen=True)
class Panels:
    """A picture of one or more panels, side by side or one above the other on the same x-axis."""

    panels: Sequence[Panel]
    height: float = 3.6
    """The picture's height in inches."""
    stacked: bool = False


@dataclass(frozen=True)
class Bars:
    """A picture of horizontal bars, each of one or more parts."""

    label: str
    """What the bars' lengths are."""
    names: Sequence[str]
    parts: Mapping[str, Sequence[float]]
    """The length of each bar's part, by the part's name."""
    colours: Mapping[str, str] | None = None
    """The colours by the parts' names; None: the usual order."""
    texts: Sequence[str] = ()
    """What is written behind each bar; empty: nothing."""


Plot = Panels | Bars
