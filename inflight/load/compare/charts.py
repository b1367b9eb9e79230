"""The figure of a comparison: what changed, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from inflight.load.compare.compare import Row
from inflight.report.drawing import BAD, FRAME, GOOD, GREY, INK, WIDTH, new_figure

_COLOURS = {"better": GOOD, "worse": BAD, "no change": GREY, "too few": FRAME}


def interval_figure(rows: Sequence[Row]) -> Figure:
    """Return the changes of figures with their intervals, in percent; those not judged are pale."""
    figure = new_figure(WIDTH, 0.8 + 0.27 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows):
        assert row.percent is not None, "chosen by the caller"
        low, high = row.percent_interval or (0.0, 0.0)
        colour = _COLOURS[row.verdict]
        axes.plot([low, high], [place, place], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot([row.percent], [place], marker="o", markersize=6, color=colour)
    for verdict in ("worse", "better", "no change", "too few"):
        if any(row.verdict == verdict for row in rows):
            axes.plot([], [], marker="o", color=_COLOURS[verdict], linewidth=2.2, label=verdict)
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("after against before, percent")
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=4)
    return figure
