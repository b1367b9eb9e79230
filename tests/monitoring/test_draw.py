"""What is drawn without Grafana: values as people read them, legends, heat maps, panels without data."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from inflight.monitoring.draw import Window, draw_panel, format_value
from inflight.monitoring.panels import Panel, Query, Unit
from inflight.monitoring.prometheus import Series

TIMES = [1e9, 1e9 + 10, 1e9 + 20]
WINDOW = Window(TIMES[0], TIMES[-1], 10)


def _series(values: list[float], **labels: str) -> Series:
    return Series(labels, TIMES[: len(values)], values)


def _drawn(panel: Panel, *found: Series, legend: str = "{{name}}") -> Axes:
    axes = Figure(figsize=(5, 3)).add_axes((0, 0, 1, 1))
    draw_panel(axes, panel, [(Query("x", legend), list(found))], WINDOW)
    return axes


def _panel(**more: object) -> Panel:
    return Panel("Title", "What it shows.", (), **more)


def _texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (0.00002, "s", "20 µs"),
        (1.5, "s", "1.5 s"),
        (600, "s", "10 min"),
        (200000, "s", "2.31 d"),
        (0, "s", "0"),
        (0.0345, "percentunit", "3.45 %"),
        (1234.4, "tokens/s", "1,234 tokens/s"),
        (2.5, "reqps", "2.5 req/s"),
        (32768, "short", "32,768"),
    ],
)
def test_values_are_written_as_people_read_them(value: float, unit: Unit, text: str) -> None:
    assert format_value(value, unit) == text


@pytest.mark.parametrize("stacked", [False, True])
def test_of_many_lines_those_that_are_zero_throughout_have_no_name(stacked: bool) -> None:
    quiet = [_series([0, 0, 0], name=f"quiet {index}") for index in range(6)]
    axes = _drawn(_panel(stacked=stacked), *quiet[:3], _series([1, 2, 3], name="stop"), *quiet[3:])
    assert _texts(axes) == ["stop"]


def test_one_server_needs_no_name_and_two_do() -> None:
    one, other = (_series([1, 2, 3], instance=name, name="up") for name in ("a:1", "b:1"))
    assert _texts(_drawn(_panel(), one, legend="{{instance}} {{name}}")) == ["up"]
    assert _texts(_drawn(_panel(), one, other, legend="{{instance}} {{name}}")) == ["a:1 up", "b:1 up"]
    assert _texts(_drawn(_panel(), one, legend="{{instance}}")) == ["a:1"]


def test_a_limit_is_drawn_unless_it_would_flatten_the_data() -> None:
    near, far = (_drawn(_panel(limit=limit), _series([1, 2, 3], name="p50")) for limit in (4.0, 40.0))
    assert _texts(near) == ["p50", "limit"]
    assert near.get_ylim()[1] > 4
    assert _texts(far) == ["p50"]


def test_a_heat_map_shows_each_bucket_less_the_one_below() -> None:
    below = {"0.1": [0, 1], "1": [2, 4], "10": [2, 5], "60": [2, 5], "+Inf": [2, 5]}
    axes = _drawn(_panel(kind="heatmap", unit="s"), *(_series(values, le=le) for le, values in below.items()))
    (mesh,) = (one for one in axes.collections if isinstance(one, QuadMesh))
    assert mesh.get_array().tolist() == [[0, 1], [2, 3], [0, 1], [0, 0]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["100 ms", "1 s", "10 s", "60 s"]


def test_a_number_is_the_last_value() -> None:
    axes = _drawn(_panel(kind="stat", unit="s"), _series([3, 2, 0.5], name="age"))
    assert [text.get_text() for text in axes.texts] == ["500 ms"]


def test_each_of_several_numbers_has_its_name() -> None:
    one, other = (_series([1, age], instance=name) for name, age in (("a:1", 3), ("b:1", 600)))
    axes = _drawn(_panel(kind="stat", unit="s"), one, other, legend="{{instance}}")
    assert [text.get_text() for text in axes.texts] == ["3 s", "a:1", "10 min", "b:1"]
    assert axes.texts[0].get_position()[0] < axes.texts[2].get_position()[0]


def test_bars_show_the_last_values() -> None:
    axes = _drawn(_panel(kind="bargauge", unit="s"), _series([1, 2], name="weights"), _series([0.5], name="warm_up"))
    assert [bar.get_width() for bar in axes.patches] == [2, 0.5]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["weights", "warm_up"]


def test_a_panel_without_data_says_so() -> None:
    assert [text.get_text() for text in _drawn(_panel()).texts] == ["no data"]
