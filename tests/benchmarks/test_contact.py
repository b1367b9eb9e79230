"""The first contact with a GPU: what a stage has found survives whatever becomes of the others; and a dry run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.contact import __main__ as contact
from benchmarks.contact import run
from benchmarks.contact.plan import CALL_S, CALLS, KERNELS, Stage
from benchmarks.contact.record import Recorder, lines
from benchmarks.contact.report import page
from benchmarks.contact.stage import STAGES
from benchmarks.contact.stage import main as run_stage
from benchmarks.contact.table import MOST_LINES, table

ROOT = Path(__file__).parents[2]
_RECORD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from benchmarks.contact.record import Recorder
recorder = Recorder(Path(os.environ["CONTACT_FILE"]), "A", os.environ["CONTACT_STAGE"])
recorder.add("before", 1.5, "s")
"""


def _stage(name: str, code: str, **more: object) -> Stage:
    return Stage(name, 60, "", command=(sys.executable, "-c", _RECORD + textwrap.dedent(code)), **more)  # type: ignore[arg-type]


def _run(folder: Path, *stages: Stage, seconds: float = 300) -> list[dict]:
    call = run.Run("A", folder, {"PYTHONPATH": str(ROOT)}, seconds)
    call.stages(stages)
    return lines(call.results)


def test_a_stage_that_hangs_crashes_or_raises_costs_no_other_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        recorder.add("child", child.pid)
        time.sleep(600)
    """

    def clock() -> float:
        """Its time-out is over as soon as it hangs, and not before, however slow the machine is."""
        hanging = any(line.get("result") == "child" for line in lines(tmp_path / "contact.jsonl"))
        return time.monotonic() + 100 * hanging

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    found = _run(
        tmp_path,
        _stage("hangs", hangs),
        _stage("crashes", "os.kill(os.getpid(), signal.SIGSEGV)"),
        _stage("raises", "raise RuntimeError('there is no such kernel')"),
        _stage("is fine", ""),
    )
    assert [line["stage"] for line in found if line.get("result") == "before"] == [
        "hangs", "crashes", "raises", "is fine",
    ]  # fmt: skip
    outcomes = {line["stage"]: line for line in found if "outcome" in line}
    assert outcomes["hangs"]["outcome"] == "timed out"
    assert outcomes["crashes"]["outcome"] == "crashed: SIGSEGV"
    assert (outcomes["raises"]["outcome"], outcomes["raises"]["note"]) == (
        "failed", "RuntimeError: there is no such kernel",
    )  # fmt: skip
    assert outcomes["is fine"]["outcome"] == "done"
    child = next(line["value"] for line in found if line.get("result") == "child")
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    told = table(found, {"before": 2.0}, "A call")
    assert "! hangs: timed out after" in told
    assert "! crashes: crashed: SIGSEGV" in told
    assert "! raises: failed" in told
    assert "is fine: before" in told
    assert "1 processes ended well, 3 did not" in told
    assert "no such kernel" in (tmp_path / "contact.log").read_text()


def _program(folder: Path, code: str, hang_up: signal.Handlers = signal.SIG_DFL) -> subprocess.Popen[str]:
    """Start a call whose stage runs ``code`` in two processes at once; return when each has a result.

    What SIGHUP does to it at first is not inherited: nohup may run these tests.
    """
    program = f"""
        import signal, sys
        signal.signal(signal.SIGHUP, signal.{hang_up.name})
        from benchmarks.contact import __main__ as contact
        from benchmarks.contact.plan import Stage
        command = (sys.executable, "-c", {_RECORD!r} + {code!r})
        contact.CALLS["A"] = (Stage("hangs", 500, "", command=command, cases=("a", "b"), at_once=2),)
        sys.exit(contact.main(["A", "--output", {str(folder)!r}]))
    """
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )
    until = time.monotonic() + 120
    while len(_children(folder)) < 2:
        assert time.monotonic() < until
        assert started.poll() is None
        time.sleep(0.05)
    return started


def _children(folder: Path) -> list[int]:
    return [line["value"] for line in lines(folder / "contact.jsonl") if line.get("result") == "process"]


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_results_and_table_survive_the_end_of_the_call(tmp_path: Path, number: signal.Signals) -> None:
    """The machine's limit, Ctrl-C, or the line that is cut: what runs then is ended, and the table comes."""
    program = _program(tmp_path, "recorder.add('process', os.getpid()); time.sleep(600)")
    for _ in range(3):  # who is impatient
        program.send_signal(number)
    told, _ = program.communicate(timeout=120)
    assert program.returncode == 128 + number
    assert "hangs: before" in told
    assert told.count("! hangs: interrupted") == 2
    assert "Traceback" not in told
    assert not any(map(psutil.pid_exists, _children(tmp_path)))


def test_under_nohup_a_call_outlives_the_line_to_the_machine(tmp_path: Path) -> None:
    program = _program(tmp_path, "recorder.add('process', os.getpid()); time.sleep(600)", signal.SIG_IGN)
    program.send_signal(signal.SIGHUP)
    program.send_signal(signal.SIGTERM)
    program.communicate(timeout=120)
    assert program.returncode == 128 + signal.SIGTERM


def test_a_full_disk_leaves_no_process_behind(tmp_path: Path) -> None:
    """The log is on a device that is always full; one process has ended and the other runs."""
    (tmp_path / "contact.log").symlink_to("/dev/full")
    both = tmp_path / "both"
    waits = f"""
while sys.argv[1] == "b" or not Path({str(both)!r}).exists():
    time.sleep(0.05)
"""
    program = _program(tmp_path, "recorder.add('process', os.getpid()); print('said')" + waits)
    both.touch()  # the first one ends when both have begun
    told, _ = program.communicate(timeout=120)
    assert program.returncode == 1
    assert "No space left on device; results cannot be kept there" in told
    assert "hangs: before" in told, "the table has what there is"
    assert "Traceback" not in told
    assert not any(map(psutil.pid_exists, _children(tmp_path)))


@pytest.mark.parametrize("place", ["file", "file/folder", "/proc/folder"])
def test_a_folder_that_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    (tmp_path / "file").touch()
    assert contact.main(["A", "--output", str(tmp_path / place)]) == 1
    assert f"{place}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["D"], "there is no call 'D'; there are A, B, C"),
        (["A", "--seconds", "nan"], "'nan' is no positive number"),
        (["A", "--seconds=-5"], "'-5' is no positive number"),
        (["A", "--stage", "tea"], "there is no stage 'tea'"),
        (["A", "--stage", "engine"], "there is no stage 'engine' in A; there are ceilings, "),
    ],
)
def test_a_bad_argument_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        contact.main([*arguments, "--output", str(tmp_path / "out")])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_cases_run_side_by_side_and_what_has_no_time_left_is_said(tmp_path: Path) -> None:
    # Each waits for the other's file: one after the other they would not end.
    meet = f"""
        mine, other = sys.argv[1], {{"a": "b", "b": "a"}}[sys.argv[1]]
        Path({str(tmp_path)!r}, mine).touch()
        while not Path({str(tmp_path)!r}, other).exists():
            time.sleep(0.05)
    """
    found = _run(tmp_path, _stage("meet", meet, cases=("a", "b"), at_once=2))
    assert [line["outcome"] for line in found if "outcome" in line] == ["done", "done"]
    late = _run(tmp_path, _stage("late", ""), seconds=0)
    assert late[-1]["outcome"] == "not begun"


@pytest.mark.parametrize(("value", "wanted"), [(True, "1"), (False, "0")])
def test_the_stop_rule(tmp_path: Path, value: bool, wanted: str) -> None:
    judge = _stage("kernels", f"recorder.add('decode', 0.5, good={value})", judges=True)
    found = _run(tmp_path, judge, _stage("engine", "recorder.add('seen', os.environ.get('CONTACT_KERNELS', '1'))"))
    assert next(line["value"] for line in found if line.get("result") == "seen") == wanted
    assert any(line.get("result") == "stop rule" for line in found) != value


def test_a_tool_that_is_not_there_is_skipped(tmp_path: Path) -> None:
    [line] = _run(tmp_path, _stage("sanitizer", "", within=("no-such-program",)))
    assert (line["outcome"], line["note"]) == ("skipped", "no-such-program is not here")


def test_a_line_that_was_not_finished_is_left_out_and_the_next_is_not(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "contact.jsonl", "A", "kernels")
    recorder.add("error", float("nan"), good=False)
    with (tmp_path / "contact.jsonl").open("a") as file:
        file.write('{"call": "A", "sta')
    recorder.outcome("timed out", 120)
    result, outcome = lines(tmp_path / "contact.jsonl")
    assert (result["value"], recorder.failures) == ("nan", 1)
    assert outcome["outcome"] == "timed out"


def test_an_attempt_that_fails_is_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path / "contact.jsonl", "B", "engine")
    with recorder.attempt("decode 64 x 512"):
        raise RuntimeError("out of memory\nin many lines")
    [line] = lines(tmp_path / "contact.jsonl")
    assert (line["good"], line["note"]) == (False, "RuntimeError: out of memory")
    assert "in many lines" in capsys.readouterr().err


def test_the_last_line_counts_a_skipped_stage_as_neither_well_nor_wrong() -> None:
    ends = [("tests", "done"), ("counters", "skipped"), ("FP8", "not begun")]
    found = [{"stage": stage, "outcome": outcome, "seconds": 1.0} for stage, outcome in ends]
    told = table(found, {}, "A call").splitlines()
    assert told[-1] == "1 processes ended well, 1 did not, 1 were skipped; 0 results are not as they must be"
    assert any(line.startswith("! counters: skipped") for line in told)


def test_the_table_fits_and_begins_with_what_is_wrong() -> None:
    many = [{"stage": "engine", "result": f"decode {row}", "value": 1234.5, "unit": "tok/s"} for row in range(200)]
    wrong = [{"stage": "kernels", "result": "decode", "value": 0.5, "unit": "error", "good": False}]
    hidden = [{"stage": "rows", "result": "in the file alone", "value": 1, "unit": "", "detail": True}]
    told = table([*many, *wrong, *hidden], {"decode 7": 1500.0}, "A call").splitlines()
    assert len(told) <= MOST_LINES
    assert sum(map(len, told)) + len(told) < 12_000
    assert told[2].startswith("! kernels: decode")
    assert "1,500" in next(line for line in told if "decode 7 " in line)
    assert "more in contact.jsonl" in told[-2]
    assert not any("in the file alone" in line for line in told)


def test_each_call_fits_into_ten_minutes_and_knows_its_stages() -> None:
    for stages in CALLS.values():
        assert CALL_S < 600
        for stage in stages:
            assert (stage.does or stage.name) in STAGES
            assert set(stage.cases) <= set(KERNELS)


def test_wheels_that_were_brought_are_installed_where_they_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contact.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "pydantic-1.0-py3-none-any.whl").touch()
    assert contact._wheels(tmp_path) == [], "pydantic is there: nothing is lacking"
    (tmp_path / "pydantic-1.0-py3-none-any.whl").unlink()
    (tmp_path / "brought-1.0-cp27-none-any.whl").touch()  # for another Python
    with zipfile.ZipFile(tmp_path / "brought-1.0-py3-none-any.whl", "w") as file:
        file.writestr("brought.py", "")
        file.writestr("brought-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        file.writestr("brought-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("brought-1.0.dist-info/RECORD", "")
    [site] = contact._wheels(tmp_path)
    assert (Path(site) / "brought.py").is_file()


def test_the_program_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    code = "import benchmarks.contact.__main__, sys; print([name for name in sys.modules])"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in eval(done.stdout)}
    assert loaded <= {*sys.stdlib_module_names, "benchmarks", "__main__", "_sysconfigdata__linux_x86_64-linux-gnu"}


def test_a_call_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        contact.main([])
    assert "name a call: A, B or C" in capsys.readouterr().err


def test_a_stage_runs_the_case_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"FILE": str(tmp_path / "contact.jsonl"), "CALL": "B", "STAGE": "check", "DRY": "1"}
    for name, value in about.items():
        monkeypatch.setenv(f"CONTACT_{name}", value)
    assert run_stage("kernels", "sampling") == 0
    found = lines(tmp_path / "contact.jsonl")
    assert {(line["stage"], line["result"].split(",")[0], line["good"]) for line in found} == {
        ("check", "sampling", True)
    }


@pytest.mark.proof
def test_a_dry_run(tmp_path: Path) -> None:
    """Some stages of each call, as a person would type them; `make gpu-contact ARGS=--dry-run` goes through all.

    Kernels are interpreted by tests/gpu, in a dry run of its own.
    """
    stages = ["imports", "rows", "modes", "counters"]
    command = [sys.executable, "-m", "benchmarks.contact", "--dry-run", "--output", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    asked = [word for stage in stages for word in ("--stage", stage)]
    done = subprocess.run([*command, *asked], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in (tmp_path / "contact.jsonl").read_text().splitlines()]
    wrong = [
        line for line in found if line.get("good") is False or line.get("outcome") not in (None, "done", "skipped")
    ]
    assert not wrong, done.stdout
    assert done.returncode == 0, done.stdout
    assert {line["stage"] for line in found if line.get("outcome") == "done"} == {*stages} - {"counters"}
    assert "First contact, call C" in done.stdout


def test_the_page_of_measurements_has_what_went_wrong_in_bold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recorder = Recorder(tmp_path / "a100-abc1234.jsonl", "A", "engine")
    recorder.add("decode 1 x 512, bf16", 150.25, "tok/s", note="one | two")
    recorder.add("bytes", 3.0, good=False)
    recorder.add("left out", 1.0, detail=True)
    recorder.outcome("done", 1)
    recorder.outcome("timed out", 9, "no answer")
    heading, *rows = [line for line in page(tmp_path).splitlines() if line.startswith(("## ", "| "))]
    assert heading.startswith("## A100, commit abc1234, 2")
    assert rows[2:] == [
        "| engine | decode 1 x 512, bf16 | 150.2 | 195.3 | tok/s | one \\| two |",
        "| **engine** | **bytes** | **3** |  |  |  |",
        "| **engine** |  | **timed out** |  |  | **no answer** |",
    ]


def test_what_the_counters_name_are_kernels() -> None:
    """Under the names that ``ncu`` sees, which are those of the functions."""
    [regex] = [word for stage in CALLS["C"] for word in stage.within if word.startswith("regex:")]
    sources = [
        (ROOT / "inflight" / "engine" / "attention" / f"{name}.py").read_text() for name in ("triton_kernels", "store")
    ]
    kernels = re.findall(r"def _(\w+)_kernel\(", "".join(sources))
    assert sorted(regex.removeprefix("regex:").split("|")) == sorted(kernels)


def test_the_page_has_every_stage() -> None:
    text = (ROOT / "docs" / "first-contact.md").read_text()
    assert not [stage.name for stages in CALLS.values() for stage in stages if stage.name.split(",")[0] not in text]
    processes = sum(len(stage.cases) or 1 for stage in CALLS["A"])
    assert f"{processes} processes ended well, 0 did not" in text
