"""`make bench ARGS=native`: what the phases of a native step must do, the machine's limits, and what changes bring."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.checkpoints import TINY
from benchmarks.native import changes, command, phases
from benchmarks.native.bounds import PHASES, Bound, Load, Types, Work, bound_of, work_of
from benchmarks.native.changes import Change, Engine, changes_result, commit_changes, measure_changes, option_changes
from benchmarks.native.phases import REST, PhaseTimes, Sampling
from benchmarks.native.probe import NUMBERS, Number, Probe, Roofs
from benchmarks.native.report import phases_result
from benchmarks.peers.checkpoints import checkpoint
from benchmarks.peers.workers.work import Cell
from inflight.errors import InflightError
from inflight.resources import ROOT
from tests.engine.support.native import SETS, each_set

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
BOUNDED = Types("bfloat16", "bfloat16")
needs_library = pytest.mark.skipif(not SETS, reason="the native step was not built")


def plain_bytes(number: Number, inputs: int, outputs: int) -> int:
    """Return the bytes of a weight without padding and scales."""
    return BYTES[number] * inputs * outputs


@pytest.mark.parametrize("load", [Load(3, 10, 1), Load(1, 0, 20), Load(2, 7, 5)], ids=lambda load: load.name)
def test_work_is_that_of_every_product_of_the_model(load: Load) -> None:
    found = work_of(TINY, load, BOUNDED, dots=False, packed_bytes=plain_bytes)
    assert tuple(found) == PHASES
    hidden, inner, vocab, layers, head_dim = TINY.hidden, TINY.intermediate, TINY.vocab, TINY.layers, 32
    kv = TINY.kv_heads * head_dim
    weights = layers * (hidden * (hidden + 2 * kv) + hidden * hidden + 3 * hidden * inner) + vocab * hidden
    of_weights = [work for name, work in found.items() if name != "attention"]
    assert sum(work.bytes for work in of_weights) == 2 * weights
    rows = load.streams * load.tokens
    in_layers = sum(work.products for name, work in found.items() if name not in ("attention", "logits"))
    assert in_layers == rows * (weights - vocab * hidden)
    assert found["logits"].products == load.streams * vocab * hidden
    attended = sum(load.start + token + 1 for _, token in product(range(load.streams), range(load.tokens)))
    assert (
        found["attention"].products == 2 * layers * attended * TINY.heads * head_dim
    )  # queries by keys, weights by values
    assert found["attention"].bytes == 2 * 2 * layers * load.streams * (load.start + load.tokens) * kv


def test_a_cache_in_int8_has_a_scale_for_each_head_of_a_token() -> None:
    work = work_of(TINY, Load(3, 128, 1), Types("bfloat16", "int8"), False, lambda *_: 0)
    per_head = TINY.hidden // TINY.heads + 2
    assert work["attention"].bytes == 2 * TINY.layers * 3 * 129 * TINY.kv_heads * per_head


def test_halves_are_multiplied_as_floats_where_there_are_no_products_of_them() -> None:
    assert BOUNDED.multiplied(dots=False) == ("float32", "float32")
    assert BOUNDED.multiplied(dots=True) == ("bfloat16", "bfloat16")
    assert Types("int8", "bfloat16").multiplied(dots=True) == ("int8", "bfloat16")
    assert Types("bfloat16", "float32").multiplied(dots=True) == ("bfloat16", "float32")


def test_a_bound_is_the_longer_of_two_times() -> None:
    roofs = Roofs(10.0, {"float32": 100.0, "bfloat16": 0.0, "int8": 200.0})
    assert roofs.mean(Roofs(30.0, dict.fromkeys(NUMBERS, 300.0))).products_per_s["int8"] == 250.0
    by_bytes = bound_of(Work(20.0, 100.0, "float32"), roofs)
    assert (by_bytes.seconds, by_bytes.binding) == (2.0, "bytes")
    by_products = bound_of(Work(20.0, 600.0, "int8"), roofs)
    assert (by_products.seconds, by_products.binding) == (3.0, "arithmetic")


@pytest.mark.proof
@each_set
def test_the_probe_measures_what_the_instruction_set_has(instruction_set: str, tmp_path: Path) -> None:
    probe = Probe(instruction_set, 2, tmp_path, stream_bytes=1 << 16)
    roofs = probe.measure(0.001)
    there = {number for number, rate in roofs.products_per_s.items() if rate > 0}
    assert there == set(NUMBERS) - (set() if instruction_set in ("avx512_bf16", "amx") else {"bfloat16"})
    assert roofs.bytes_per_s > 0
    panel = 16 if instruction_set == "avx2" else 64
    group = 64 if instruction_set in ("avx2", "avx512") else 32
    assert probe.packed_bytes("float32", 5, panel + 1) == 2 * panel * 6 * 4  # whole panels, whole pairs of inputs
    assert probe.packed_bytes("bfloat16", 5, panel) == panel * 6 * 2
    assert probe.packed_bytes("int8", group + 1, panel) == 2 * panel * (group + 2)  # a scale for each group


def test_a_probe_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    with pytest.raises(InflightError, match="no C\\+\\+ compiler is installed"):
        Probe("avx2", 1, tmp_path)


def test_the_table_of_phases_says_what_is_reached_and_what_has_no_bound() -> None:
    load = Load(8, 128, 1)
    work = {name: Work(2e6, 3e6, "float32") for name in PHASES}
    seconds = dict.fromkeys(PHASES, 0.004) | {"down": 0.010, REST: 0.001}
    times = PhaseTimes(load, work, seconds, dict.fromkeys(PHASES, Bound(0.002, 0.001)))
    result = phases_result("phases", TINY, BOUNDED, "kernels for avx2 and 2 threads", 5, [times])
    rows = {row["phase"]: row for row in result.rows}
    assert rows["down"]["reached, %"] == 20
    assert rows["qkv"]["reached, %"] == 50
    assert rows["qkv"]["bound by"] == "bytes"
    assert rows[REST]["bound, ms"] == ""
    assert (rows["all"]["ms"], rows["all"]["bound, ms"]) == (31.0, 12.0)
    assert "decode, 8 x 128: 31.0 ms, 39 %" in result.finding
    assert "down in decode, 8 x 128 (8.0 ms)" in result.finding
    assert result.figure is not None
    step, bounds = (sum(bar.get_height() for bar in result.figure.axes[0].patches[place::2]) for place in (0, 1))
    assert (step, bounds) == (pytest.approx(100), pytest.approx(100 * 12 / 31))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the command's options of a tiny run."""
    monkeypatch.setitem(command.SHAPES, TINY.name, TINY)
    monkeypatch.setattr(command, "Probe", partial(Probe, stream_bytes=1 << 16))
    monkeypatch.setattr(phases, "Sampling", partial(Sampling, steps_s=1e-9, probe_s=0.001))
    monkeypatch.chdir(tmp_path)
    loads = ["--streams", "1", "--streams", "2", "--prefill", "20", "--rounds", "1", "--threads", "1"]
    return ["native", "--model", TINY.name, *loads]


@pytest.mark.proof
@pytest.mark.sweep(most=2)
@needs_library
@pytest.mark.parametrize("weights", NUMBERS)
def test_the_command_writes_the_phases_of_each_load(weights: Number, tiny: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(bench, [*tiny, "--part", "phases", "--weights", weights, "--output", "results"])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / f"results/phases-{TINY.name}-{weights}.json").read_text())
    steps = [row["step"] for row in record["rows"]]
    assert list(dict.fromkeys(steps)) == ["decode, 1 x 128", "decode, 2 x 128", "prefill, 1 x 20"]
    for step in steps:
        *parts, whole = [row for row in record["rows"] if row["step"] == step]
        assert [row["phase"] for row in parts] == [*PHASES, REST]
        assert all(row["ms"] >= 0 for row in parts)
        assert sum(row["ms"] for row in parts) == pytest.approx(whole["ms"], abs=0.01)
    assert f"--part phases --weights {weights}" in record["command"]
    assert (tmp_path / f"results/phases-{TINY.name}-{weights}.svg").is_file()
    assert (tmp_path / "results/README.md").is_file()


@pytest.mark.proof
@needs_library
def test_the_phases_of_another_cache_have_files_of_their_own(tiny: list[str], tmp_path: Path) -> None:
    options = ["--part", "phases", "--weights", "bfloat16", "--kv-cache", "int8", "--output", "results"]
    done = CliRunner().invoke(bench, [*tiny, *options])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / f"results/phases-{TINY.name}-bfloat16-kv-int8.json").read_text())
    assert "--kv-cache int8" in record["command"]
    assert record["title"].endswith("weights in bfloat16, KV cache in INT8, behind 128 tokens")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "7T"], "'7T' is not one of 6.8M, 125M"),
        (["--weights", "int2"], "'int2' is not one of float32"),
        (["--kv-cache", "int2"], "'int2' is not one of float32"),
        (["--kv-cache", "int8", "--part", "options"], "it is of the phases, which are not measured"),
        (["--kv-cache", "int8", "--commit", "HEAD"], "it is of the phases, which are not measured"),
        (["--weights", "int8", "--part", "options"], "it is of the phases, which are not measured"),
        (["--weights", "int8", "--commit", "HEAD"], "it is of the phases, which are not measured"),
        (["--part", "phases", "--commit", "HEAD"], "it cannot be given beside --commit"),
        (["--part", "all"], "'all' is not one of phases, options"),
        (["--context", "5"], "5 is not one of 128, 1024, 4096"),
    ],
)
def test_an_option_that_is_not_known_is_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(bench, ["native", *options], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in done.output


@needs_library
def test_an_instruction_set_that_is_not_there_is_one_line() -> None:
    done = CliRunner().invoke(bench, ["native", "--instruction-set", "avx9"])
    assert done.exit_code == 1
    assert "this processor has no avx9; it has" in done.output


def measured(speed: float) -> dict[str, Any]:
    """Return an engine's measurement."""
    return {"figures": {"decode, 1 x 128": speed}, "others": speed / 1000}


def test_a_change_is_the_median_of_its_rounds_ratios() -> None:
    new, old = Engine("new", 1), Engine("old", 1)
    found = [{"new": measured(a), "old": measured(b)} for a, b in ((20, 10), (30, 10), (80, 20))]
    result = changes_result("options", "Options", "What.", [Change("it", new, old)], ["decode, 1 x 128"], found)
    [row] = result.rows
    assert row["change"] == "it"
    assert str(row["decode, 1 x 128, times"]).startswith("3.00 (")
    assert row["decode, 1 x 128, tokens/s"] == 30
    assert "3 rounds" in result.finding
    assert "8 % of the processors" in result.finding


def test_options_are_compared_with_the_others_at_their_best() -> None:
    found = option_changes(["avx512_bf16", "avx512", "avx2"], 2)
    names = [change.name for change in found]
    assert names[:4] == [
        "the native step, not PyTorch", "avx512_bf16, not avx512", "avx512_bf16, not avx2", "2 threads, not 1",
    ]  # fmt: skip
    settings = {change.name: (change.changed.settings, change.before.settings) for change in found}
    best = {"dtype": "bfloat16", "cpu_step": "avx512_bf16"}
    assert settings["avx512_bf16, not avx2"] == (best, best | {"cpu_step": "avx2"})
    assert settings["weights in INT8, not bfloat16"] == (best | {"weights": "int8"}, best)
    assert settings["weights in bfloat16, not float32"] == (
        best | {"kv_cache_dtype": "float32"},
        best | {"dtype": "float32"},
    )
    assert not any("threads" in change.name for change in option_changes(["avx2"], 1))


def test_each_round_measures_each_engine_once_and_begins_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(changes, "_measure", lambda engine, *_: order.append(engine.name) or {"name": engine.name})
    one, two, three = (Engine(name, 1) for name in "abc")
    found = measure_changes(
        [Change("x", two, one), Change("y", three, one)], Path("model"), [], 2, Path("folder"), (), lambda _: None
    )
    assert order == [*"abc", *"bca"]
    assert found == [{name: {"name": name} for name in "abc"}, {name: {"name": name} for name in "bca"}]


def test_an_engine_of_another_checkout_has_its_package_and_the_benchmarks_of_this_one(tmp_path: Path) -> None:
    other = tmp_path / "other/inflight"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    script = "import inflight, benchmarks; print(inflight.__file__); print(benchmarks.__file__)"
    for _ in range(2):  # the second run finds the first one's links
        paths = changes._paths(Engine("old", 1, checkout=tmp_path / "other"), tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env={"PYTHONPATH": str(paths)}, cwd=ROOT, capture_output=True, text=True
    )
    package, benchmarks = (Path(line).resolve() for line in done.stdout.splitlines())
    assert (package.parent, benchmarks.parent) == (other.resolve(), ROOT / "benchmarks")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Return what commits a build script with a message; the benchmark's repository is an empty one."""
    folder = tmp_path / "repository"
    (folder / "native").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(changes, "ROOT", folder)

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        return subprocess.run(
            ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(script: str, message: str) -> str:
        (folder / "native/build.py").write_text(script)
        git("add", ".")
        git("commit", "-q", "-m", message)
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    return commit


BUILDS = "from pathlib import Path; Path(__file__).with_name('built').touch()"


@pytest.mark.proof
def test_commits_are_built_and_each_is_compared_with_the_one_before(
    repository: Callable[[str, str], str], tmp_path: Path
) -> None:
    first, second = repository(BUILDS, "The first: it is slow"), repository(f"{BUILDS}\n", "The second; faster")
    found = commit_changes([first, second], tmp_path, 2, lambda _: None)
    assert [(change.name, change.before.name, change.changed.name) for change in found] == [
        (f"{second} The second", first, second),
        ("this checkout", second, "this checkout"),
    ]
    assert (tmp_path / first / "native/built").is_file()
    assert (tmp_path / second / "native/build.py").read_text() == f"{BUILDS}\n"


def test_a_commit_that_is_not_there_or_cannot_be_built_is_named(
    repository: Callable[[str, str], str], tmp_path: Path
) -> None:
    broken = repository("raise SystemExit('no compiler')", "Broken")
    with pytest.raises(InflightError, match="no compiler"):
        commit_changes([broken], tmp_path, 2, lambda _: None)
    with pytest.raises(InflightError, match="nowhere"):
        commit_changes(["nowhere"], tmp_path, 2, lambda _: None)


@pytest.mark.proof
@needs_library
def test_an_engine_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    cells = [Cell(2, 8, 4)]
    engines = Engine("bfloat16", 1, {"dtype": "bfloat16"}), Engine("INT8", 1, {"dtype": "bfloat16", "weights": "int8"})
    directory = checkpoint(TINY, tmp_path)
    [found] = measure_changes([Change("x", *engines)], directory, cells, 1, tmp_path, ["env"], lambda _: None)
    assert set(found) == {"bfloat16", "INT8"}
    assert all(one["figures"]["decode, 2 x 8"] > 0 for one in found.values())
