"""`inflight top` without a server: what a page and a snapshot say, and how it looks on any terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from inflight.cli import app
from inflight.client.errors import ServerUnreachable
from inflight.errors import EngineFailure, InflightError, UnsupportedFeature
from inflight.top.frame import block_map, frame, missing, sparkline
from inflight.top.history import Figures, History, quantile
from inflight.top.poller import Page, Poll, ServerPoller
from inflight.top.top import _fitted
from tests.top.support.pages import REQUEST, SNAPSHOT, page, plain

OFF: InflightError = UnsupportedFeature("inspect is not allowed")


def text(poll: Poll, figures: Figures = Figures(), width: int = 120, rows: int = 10) -> str:  # noqa: B008
    """Return a frame as plain text."""
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"), color_system=None)  # noqa: SIM115
    console.print(frame(poll, figures, missing(poll), width, rows))
    return console.export_text()


def test_rates_are_differences() -> None:
    history = History()
    for at, scale in ((0.0, 1), (1.0, 2), (2.0, 4)):
        history.add(Poll(at, SNAPSHOT, page(scale)))
    figures = history.figures(Poll(2.0, SNAPSHOT, page(4)))
    assert (figures.window_s, figures.output_tokens_per_s, figures.input_tokens_per_s) == (2.0, 150.0, 75.0)
    assert (figures.requests_per_s, figures.steps_per_s, figures.step_s, figures.batch) == (3.0, 37.5, 0.02, 4.0)
    assert figures.hit_rate == 0.4
    assert figures.series == (100.0, 200.0)
    median, high = figures.latencies["ITL"]
    assert median == pytest.approx(0.01 * 50 / 80)
    assert high == pytest.approx(0.01 + 0.015 * 19 / 20)
    assert figures.latencies["TTFT"] == (None, None)


def test_the_window_and_the_series_are_bounded() -> None:
    history = History()
    for second in range(100):
        history.add(Poll(float(second), SNAPSHOT, page(second)))
    figures = history.figures(Poll(99.0, SNAPSHOT, page(99)))
    assert figures.window_s == 10.0
    assert len(figures.series) == 60


def test_looks_far_apart_have_a_rate_too() -> None:
    history = History()
    for at, scale in ((0.0, 1), (100.0, 2), (200.0, 5)):
        history.add(Poll(at, SNAPSHOT, page(scale)))
    figures = history.figures(Poll(200.0, SNAPSHOT, page(5)))
    assert (figures.window_s, figures.output_tokens_per_s, figures.series) == (100.0, 3.0, (3.0,))


@pytest.mark.parametrize("done_since", [1, 9])
def test_another_servers_counters_are_not_compared(done_since: int) -> None:
    history = History()
    history.add(Poll(0.0, SNAPSHOT, page(5)))
    poll = Poll(1.0, SNAPSHOT, page(done_since, start=1.7e9 + 0.25))
    history.add(poll)
    assert history.figures(poll) == Figures()
    history.add(Poll(2.0, SNAPSHOT, ServerUnreachable("gone")))
    poll = Poll(3.0, SNAPSHOT, page(done_since + 1, start=1.7e9 + 0.25))
    history.add(poll)
    assert history.figures(poll).output_tokens_per_s == 50.0


def test_rates_are_not_shown_beside_a_look_without_metrics() -> None:
    history = History()
    for at, scale in ((0.0, 1), (1.0, 2)):
        history.add(Poll(at, SNAPSHOT, page(scale)))
    poll = Poll(2.0, SNAPSHOT, ServerUnreachable("gone"))
    history.add(poll)
    assert history.figures(poll) == Figures()


def test_quantiles_are_those_of_prometheus() -> None:
    buckets = {0.1: 10.0, 0.5: 30.0, float("inf"): 40.0}
    assert quantile(buckets, 0.25) == pytest.approx(0.1)
    assert quantile(buckets, 0.5) == pytest.approx(0.1 + 0.4 * 10 / 20)
    assert quantile(buckets, 0.99) == 0.5
    assert quantile(dict.fromkeys(buckets, 0.0), 0.5) is None
    assert quantile({}, 0.5) is None


def test_what_is_no_page_is_said() -> None:
    with pytest.raises(EngineFailure, match="not a page of metrics"):
        Page("<html>no such page</html>")


def test_a_frame_says_it_all() -> None:
    history = History()
    for at, scale in ((0.0, 1), (1.0, 2)):
        history.add(Poll(at, SNAPSHOT, page(scale)))
    poll = Poll(1.0, SNAPSHOT, page(2))
    shown = text(poll, history.figures(poll))
    for words in (
        "100  tokens/s", "1 of 4", "2 of 256", "25 steps/s of 20 ms, 4 sequences each", "3 used", "2 cached",
        "3 free", "███▒▒···", "prefix hits: 40% of prompt tokens", "decode", "5/64", "12.5", "and 2 more",
    ):  # fmt: skip
        assert words in shown, words


def test_a_clients_id_is_shown_as_it_is() -> None:
    """It may be anything: what a terminal, or who draws the table, would obey too."""
    snapshot = replace(SNAPSHOT, requests=(replace(REQUEST, request_id="[/b][red]\x1b[2J"),))
    assert "[/b][red]\\x1b[2J" in text(Poll(0.0, snapshot, page(1)))


@pytest.mark.parametrize("width", [24, 40, 79, 80, 100, 200])
def test_panels_fit_any_width(width: int) -> None:
    shown = text(Poll(0.0, SNAPSHOT, page(1)), width=width)
    for words in ("throughput", "latency", "batch and queue", "KV cache", "request", "state", "a-long-", "decode"):
        assert words in shown, words


@pytest.mark.parametrize(
    ("size", "columns", "low"),
    [
        ((24, 30), {"state"}, True),
        ((40, 24), {"state", "generated", "age"}, True),
        ((80, 24), {"state", "prompt", "cached", "generated", "tokens/s", "queued", "age"}, True),
        ((100, 30), {"state", "generated", "priority", "preempted"}, True),
        ((80, 80), {"state", "age"}, False),
        ((120, 40), {"state", "generated", "priority", "preempted"}, False),
        ((200, 60), {"state", "generated", "priority", "preempted"}, False),
    ],
)
def test_requests_have_half_of_any_terminal(size: tuple[int, int], columns: set[str], low: bool) -> None:
    busy = replace(SNAPSHOT, running=4, waiting=96, requests=(replace(REQUEST, max_tokens=2048, age_s=945.0),) * 100)
    history = History()
    for second in range(60):
        poll = Poll(float(second), busy, page(second))
        history.add(poll)
    console = Console(width=size[0], height=size[1], record=True, file=io.StringIO())
    console.print(_fitted(console, ServerPoller("localhost:8001", None), poll, history.figures(poll), []))
    lines = console.export_text().splitlines()
    heading = next(line for line in lines if line.startswith("request "))
    rows = [line for line in lines if " decode" in line]
    assert len(lines) == size[1]
    assert columns <= set(heading.split())
    assert len(rows) >= (size[1] // 2 - 2 if size[0] >= 80 else 1)
    assert all(row.startswith("a-long-") for row in rows)
    for told in ("5/2048", "15.8 min") if "age" in columns else ():
        assert all(told in row for row in rows), told
    assert any("╭" in line for line in lines) != low
    for words in ("TTFT", "p99", "4 of 4", "3 of 8", "steps/s"):
        assert any(words in line for line in lines), words


def test_without_inspection_the_metrics_say_what_they_can() -> None:
    shown = text(Poll(0.0, OFF, page(1)))
    for words in ("no requests and no block map: inspect is not allowed", "3 of 4", "9 of 10", "5 of 8"):
        assert words in shown, words


def test_without_metrics_the_snapshot_says_what_it_can() -> None:
    shown = text(Poll(0.0, SNAPSHOT, ServerUnreachable("http://x:1/metrics: refused")))
    assert re.search(r"no rates and no latencies: http://x:1/metrics: refused", shown)
    assert "1 of 4" in shown
    assert "–  tokens/s" in shown


def test_a_map_shows_several_blocks_as_one_where_room_is_short() -> None:
    states = ["used"] * 4 + ["used", "free"] + ["cached", "free"] + ["free"] * 2
    assert block_map(states, 10, 1) == ["█████·▒···"]
    assert block_map(states, 5, 1) == ["██▓▒·"]
    assert block_map(states, 3, 2) == ["██▓", "▒·"]
    assert sparkline([0, 50, 100], 10) == "▁▅█"
    assert sparkline([0, 0], 10) == "▁▁"
    assert sparkline([1, 2, 3], 2) == "▆█"


def test_a_server_that_is_not_there_is_one_line() -> None:
    done = CliRunner().invoke(app, ["top", "--once", "--url", "127.0.0.1:9", "--metrics", "127.0.0.1:9"])
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 1
    assert re.fullmatch(r"inflight: .*127\.0\.0\.1:9.*\n", plain(done.output))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", ""], "--url is ''; it must be [scheme://]host:port, such as localhost:8001"),
        (["--url", "http:///x"], "--url is 'http:///x'; it must be"),
        (["--url", "localhost:grpc"], "--url is 'localhost:grpc': Port could not be cast"),
        (["--url", "gprc://h:1"], "one of grpc, grpcs, http, https (did you mean 'grpc'?)"),
        (["--metrics", ""], "--metrics is ''; it must be"),
        (["--metrics", "grpc://h:1"], "--metrics is 'grpc://h:1': the scheme must be one of http, https"),
    ],
)
def test_what_is_no_address_is_one_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["top", "--once", *arguments])
    assert isinstance(done.exception, SystemExit)
    said = plain(done.output)
    assert said.startswith("inflight: ")
    assert said.count("\n") == 1
    assert message in said


def test_a_picture_that_cannot_be_written_is_refused_before_the_watching(tmp_path: Path) -> None:
    for svg in (tmp_path / "missing" / "x.svg", tmp_path):
        done = CliRunner().invoke(app, ["top", "--once", "--after", "60", "--url", "127.0.0.1:9", "--svg", str(svg)])
        assert isinstance(done.exception, SystemExit)
        assert done.exit_code == 2
        assert "--svg" in plain(done.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--svg", "x.svg"], "--svg goes with --once"),
        (["--after", "3"], "--after goes with --once"),
        ([], "not a terminal"),
        (["--interval", "0"], "--interval"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["top", *arguments])
    assert done.exit_code == 2
    assert message in plain(done.output)
