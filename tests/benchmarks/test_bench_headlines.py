"""The headlines in their quick mode: that each runs, and what does not depend on the machine's speed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.engine_commands import HEADLINE_NAMES
from benchmarks.headlines.catalogue import HEADLINES
from benchmarks.result import Result, markdown_table, write_page, write_result
from benchmarks.setting import Setting
from inflight.errors import InflightError

CHEAPEST = "paging"
Results = Callable[[str], Result]


@pytest.fixture(scope="module")
def result_of(setting: Setting) -> Results:
    """Return a headline's result, measured once."""
    return functools.cache(lambda name: HEADLINES[name](setting))


def test_the_command_knows_their_names() -> None:
    assert tuple(HEADLINES) == HEADLINE_NAMES


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(HEADLINES, key=lambda name: name != CHEAPEST))
def test_each_has_a_table_a_picture_and_a_sentence(result_of: Results, name: str) -> None:
    result = result_of(name)
    assert result.name == name
    assert result.rows
    assert all(row.keys() == result.rows[0].keys() for row in result.rows)
    assert result.finding.endswith(".")
    assert result.figure is not None
    assert all(axes.lines or axes.patches for axes in result.figure.axes)


def test_paging_wastes_less_than_any_contiguous_piece_and_more_with_larger_blocks(result_of: Results) -> None:
    small, large = result_of("paging").rows
    assert 0 < float(small["paged_%"]) < float(large["paged_%"])
    assert float(small["paged_%"]) < min(float(small[f"{way}_%"]) for way in ("power", "asked", "longest"))


@pytest.mark.proof
def test_static_batches_take_more_steps_unless_all_are_equally_long(result_of: Results) -> None:
    steps = {(row["lengths"], row["mode"]): float(row["inflight_gains_in_steps"]) for row in result_of("batching").rows}
    assert steps["equal", "static"] == steps["equal", "dynamic"] == 1
    assert steps["uniform", "static"] > 1.2
    assert steps["long tail", "static"] > 1.2


def test_reuse_computes_the_question_alone_and_a_changed_word_takes_it_away(result_of: Results) -> None:
    computed = {(row["shared_tokens"], row["kind"]): row["computed_tokens"] for row in result_of("prefix").rows}
    assert computed[1000, "reuse"] == 24
    assert computed[1000, "no reuse"] == computed[1000, "reuse, first word changed"] == 1024
    assert computed[1000, "reuse, word changed at 50%"] == 524


@pytest.mark.proof
def test_half_the_bytes_hold_twice_the_sequences_and_quality_stays(result_of: Results) -> None:
    by = {row["kv_cache"]: row for row in result_of("kv-types").rows}
    assert float(by["fp8"]["sequences_at_once"]) == 2 * float(by["bfloat16"]["sequences_at_once"])
    assert by["float32"]["kl_divergence"] == 0
    assert all(0 < float(by[name]["kl_divergence"]) < 0.01 for name in ("bfloat16", "fp8", "int8"))


@pytest.mark.proof
def test_drafts_are_accepted_as_often_as_they_are_right(result_of: Results) -> None:
    for row in result_of("speculation").rows:
        assert row["accepted_%"] == 100 * float(row["chance"])


@pytest.mark.proof
def test_a_prefix_comes_back_from_a_second_tier_alone(result_of: Results) -> None:
    for row in result_of("offload").rows:
        assert row["restored_tokens"] == (0 if "computed" in str(row["kind"]) else row["prefix_tokens"])


@pytest.mark.proof
def test_quantized_weights_are_smaller_and_lose_little(result_of: Results) -> None:
    original, *quantized = result_of("weights").rows
    assert original["kl_divergence"] == 0
    assert [row["weights"] for row in quantized] == ["fp8", "int8"]
    for row in quantized:
        assert float(row["demo_MB"]) < 0.7 * float(original["demo_MB"])
        assert 0 < float(row["kl_divergence"]) < 0.01


@pytest.mark.proof
def test_no_cache_finds_more_than_an_unlimited_one(result_of: Results) -> None:
    rows = result_of("eviction").rows
    assert all(0 < float(row["hit_%"]) < float(row["unlimited_cache_%"]) for row in rows)
    found = {(row["kind"], row["cache_tokens"]): float(row["hit_%"]) for row in rows}
    assert found["steady, lru", 1024] < found["steady, lru", 8192]
    assert found["steady, lru", 8192] < found["steady, lfu", 8192]  # what comes once pushes out what is popular


def test_files_and_page(tmp_path: Path, result_of: Results) -> None:
    write_result(result_of("paging"), tmp_path, 'make bench ARGS="headlines paging"')
    write_result(result_of("prefix"), tmp_path, 'make bench ARGS="headlines prefix"')
    write_page(tmp_path, "Headlines", "All of them.", HEADLINE_NAMES)
    record = json.loads((tmp_path / "paging.json").read_text())
    assert record["rows"] == [dict(row) for row in result_of("paging").rows]
    assert {"command", "commit", "machine", "date"} <= record.keys()
    page = (tmp_path / "README.md").read_text()
    assert page.index("(paging.svg)") < page.index("(prefix.svg)")
    assert '`make bench ARGS="headlines prefix"`' in page
    assert (tmp_path / "paging.svg").read_text().startswith("<svg")


def test_a_caveat_stands_in_the_picture_and_on_the_page(tmp_path: Path, result_of: Results) -> None:
    result = Result("some", "Some", "It is so.", [{"a": 1}], result_of("paging").figure, "A CPU has no such thing.")
    write_result(result, tmp_path, "command")
    write_page(tmp_path, "Page", "Lead.", ["some", "absent"])
    assert "A CPU has no such thing." in (tmp_path / "some.svg").read_text()
    assert "A CPU has no such thing." in (tmp_path / "README.md").read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InflightError, match=f"{blocked}.*cannot be written"):
        write_result(Result("some", "Some", "So.", [{"a": 1}]), blocked, "command")


def test_a_table_says_numbers_as_people_read_them() -> None:
    assert markdown_table([{"tokens_per_s": 12345, "kind": "one"}]).splitlines() == [
        "| tokens per s | kind |", "| ---: | --- |", "| 12,345 | one |",
    ]  # fmt: skip


def test_the_command_writes_what_it_is_asked_for(tmp_path: Path, folder: Path) -> None:
    arguments = ["headlines", "paging", "--quick", "--checkpoints", str(folder), "--output", str(tmp_path)]
    done = CliRunner().invoke(bench, arguments)
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "paging.json", "paging.svg"}
    assert json.loads((tmp_path / "paging.json").read_text())["command"] == 'make bench ARGS="headlines paging --quick"'


def test_an_unknown_name_is_refused_by_name() -> None:
    done = CliRunner().invoke(bench, ["headlines", "pagin"])
    assert done.exit_code == 2
    assert "'pagin' is not one of" in done.output


@pytest.mark.proof
def test_turns_share_what_arrival_gives_to_the_first(result_of: Results) -> None:
    shares = {(row["served"], row["client"]): float(row["share_%"]) for row in result_of("fairness").rows}
    assert shares["by arrival", "second"] == 0
    assert 35 < shares["by turns", "second"] < 65
