"""Pictures have a title, and every colour of a plot has another for a dark page."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from inflight.report.drawing import draw, new_figure, svg
from inflight.report.page import Section, render_page
from inflight.report.plots import BAD, BLUE, COLOURS, GREEN, GREY, Bars, Line, Mark, Panel, Panels
from inflight.report.table import print_table
from tests.support.tables import each_row

ROOT = Path(__file__).parents[2]
PICTURES = sorted((ROOT / "docs").rglob("*.svg"))
_COLOUR = re.compile(r"(fill|stroke): (#[0-9a-f]{6})")


def _has_dark_twin(picture: str) -> list[str]:
    """Return the colours of a plot's marks that its style sheet does not change on a dark page."""
    sheet = re.search(r"<style>(@media \(prefers-color-scheme:dark\).*?)</style>", picture)
    assert sheet is not None
    body = picture.replace(sheet[0], "")
    return [f"{what}: {colour}" for what, colour in _COLOUR.findall(body) if f"{what}: {colour}" not in sheet[1]]


@each_row("path", PICTURES, ids=lambda path: path.name)
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
    axes.legend()
    picture = svg(figure, "Lines & more")
    assert picture.startswith("<svg")
    assert "<title>Lines &amp; more</title>" in picture
    assert "a &lt; b" in picture
    assert not _has_dark_twin(picture)


@pytest.mark.parametrize("largest", [9, 150_000, 3_000_000])
def test_numbers_below_an_axis_do_not_touch(largest: int) -> None:
    line = Line([0, largest], [0, 1])
    figure = draw(Panels([Panel("tokens/s", "ms", [line]), Panel("tokens/s", "ms", [line], x_limits=(0, largest))]))
    figure.draw_without_rendering()
    for axes in figure.axes:
        low, high = axes.get_xlim()
        shown = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: box.x0)
        assert len(boxes) > 2
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


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


def _names(plot: Panels | Bars) -> list[str]:
    """Return the entries of a plot's legend."""
    [legend] = draw(plot).legends
    return [text.get_text() for text in legend.get_texts()]


def test_panels_share_one_legend_with_each_name_once() -> None:
    lines = [Line([1, 2], [3, 4], name="measured"), Line([1, 2], [4, 5], GREEN, "measured"), Line([1, 2], [1, 1], GREY)]
    mark = Mark(3, "objective", BAD, axis="y")
    assert _names(Panels([Panel("x", "y", lines), Panel("x", "z", lines, [mark])])) == ["measured", "objective"]
    assert draw(Panels([Panel("x", "y", [Line([1], [2])])])).legends == []


def test_an_axis_is_logarithmic_where_values_differ_much() -> None:
    def scale(*heights: float) -> str:
        [axes] = draw(Panels([Panel("x", "y", [Line(range(len(heights)), heights)], log_y=True)])).axes
        return axes.get_yscale()

    assert scale(1, 20) == "linear"
    assert scale(1, 21) == "log"
    assert scale(0, 5, 6) == "linear", "0 has no logarithm"


def test_labels_stand_apart_and_the_last_one_stays() -> None:
    line = Line([1, 1.01, 50, 100], [1, 1.01, 50, 100], labels=["a", "b", "c", "d"])
    [axes] = draw(Panels([Panel("x", "y", [line])])).axes
    assert [text.get_text() for text in axes.texts] == ["d", "c", "b"]


def test_a_series_of_very_many_points_is_thinned_and_keeps_its_ends() -> None:
    [axes] = draw(Panels([Panel("x", "y", [Line(range(50_000), range(50_000))])])).axes
    drawn = axes.lines[0].get_xdata()
    assert len(drawn) == 4000
    assert (drawn[0], drawn[-1]) == (0, 49_999)


def test_hollow_points_are_rings_over_their_line() -> None:
    line = Line([1, 2], [3, 4], BLUE, marker="o", hollow=[False, True])
    [axes] = draw(Panels([Panel("x", "y", [line])])).axes
    whole, ring = axes.lines
    assert list(ring.get_xdata()) == [2]
    assert ring.get_markerfacecolor() != whole.get_markerfacecolor()


def test_bars_have_their_parts_end_to_end_or_a_text_behind_them() -> None:
    stacked = Bars("GiB", ["a", "b"], {"used": [1, 2], "free": [3, 0.25]})
    [axes] = draw(stacked).axes
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 1), (0, 2), (1, 3), (2, 0.25)]
    assert [text.get_text() for text in axes.texts] == ["1.0", "2.0", "3.0", ""], "the last part is too short"
    assert _names(stacked) == ["used", "free"]
    single = draw(Bars("USD", ["a", "b"], {"price": [1, 2]}, texts=["1 USD", "2 USD"]))
    assert [text.get_text() for text in single.axes[0].texts] == ["1 USD", "2 USD"]
    assert single.legends == []


def test_a_stacked_plot_names_its_x_axis_once() -> None:
    panels = [Panel("seconds", name, [Line([0, 1], [1, 2])]) for name in ("upper", "lower")]
    assert [axes.get_xlabel() for axes in draw(Panels(panels, stacked=True)).axes] == ["", "seconds"]


def test_a_page_draws_its_plots() -> None:
    plot = Panels([Panel("x", "y", [Line([1, 2], [3, 4], shape="bars")])])
    page = render_page("Title", "Lead.", [Section("Bars", plot=plot), Section("Nothing")])
    assert page.count("<svg") == 1
    assert "<title>Bars</title>" in page


def test_a_terminals_table_aligns_words_left_and_numbers_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        "Two", [{"name": "a", "tokens_per_s": 1234.5678, "none": None}, {"name": "bcd", "tokens_per_s": 5.0, "none": 1}]
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Two"
    assert "  a      1,234.6" in lines
    assert any(line.startswith("  bcd          5") for line in lines)


def test_a_terminals_table_shows_what_looks_like_a_style(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells quote files of strangers."""
    print_table("[dim]Models[/dim] in [/tmp]", [{"[bold]name": "re:[a-z]+(", "why": "version is 'gemv[/b]'"}])
    shown = capsys.readouterr().out
    for text in ("[dim]Models[/dim] in [/tmp]", "[bold]name", "re:[a-z]+(", "version is 'gemv[/b]'"):
        assert text in shown
