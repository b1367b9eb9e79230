"""Pictures have a title, and every colour of a plot has another for a dark page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.report.drawing import BLUE, COLOURS, legend_above, new_figure, svg
from inflight.report.page import Section, render_page

ROOT = Path(__file__).parents[2]
PICTURES = sorted((ROOT / "docs").rglob("*.svg"))
_COLOUR = re.compile(r"(fill|stroke): (#[0-9a-f]{6})")


def _has_dark_twin(picture: str) -> list[str]:
    """Return the colours of a plot's marks that its style sheet does not change on a dark page."""
    sheet = re.search(r"<style>(@media \(prefers-color-scheme:dark\).*?)</style>", picture)
    assert sheet is not None
    body = picture.replace(sheet[0], "")
    assert "<image" not in body or "image{filter" in sheet[1]  # a heat map, which is a raster
    return [f"{what}: {colour}" for what, colour in _COLOUR.findall(body) if f"{what}: {colour}" not in sheet[1]]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_committed_picture_says_what_it_shows(path: Path) -> None:
    picture = path.read_text()
    assert re.search(r"<title>[^<]{3,}</title>", picture)
    if "matplotlib" in picture or 'id="figure_1"' in picture:
        assert not _has_dark_twin(picture)


def test_a_plot_keeps_its_text_and_changes_all_its_colours_on_a_dark_page() -> None:
    figure = new_figure(5, 3)
    axes = figure.subplots()
    for height, colour in enumerate(COLOURS):
        axes.plot([0, 1], [height, height + 1], color=colour, label=f"line {height}")
    axes.set_xlabel("a < b")
    legend_above(axes)
    picture = svg(figure, "Lines & more")
    assert picture.startswith("<svg")
    assert "<title>Lines &amp; more</title>" in picture
    assert "a &lt; b" in picture
    assert not _has_dark_twin(picture)


def test_equal_figures_give_equal_pictures() -> None:
    def draw() -> str:
        figure = new_figure(4, 2)
        figure.subplots().plot([1, 2], color=BLUE)
        return svg(figure, "One line")

    assert draw() == draw()


def test_a_column_is_aligned_as_one() -> None:
    table = [{"name": "a", "value": "217 of 240", "change": "+5.00%"}, {"name": "b", "value": 3.5, "change": "-1%"}]
    page = render_page("Title", "Lead.", [Section("Table", table=table)])
    assert page.count('<td class="text">') == 4  # both columns with words, in both rows
    assert "<th>change</th>" in page
