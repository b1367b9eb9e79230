"""Why a server ended, as its log has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.serve import log as log_module
from inflight.serve.log import UNKNOWN, CrashWatch, StageLine, StageLog, cause, keep

NOISE = """\
W0101 00:00:00.000000 7 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
E0101 00:00:00.000000 7 server.cc:241] "CudaDriverHelper has not been initialized."
I0101 00:00:00.000000 7 model_lifecycle.cc:472] "loading: tokenizer:1"
"""
GONE = "2026-01-01 00:00:02,000 ERROR inflight.triton.process: the server has gone, and the stage with it\n"
FAILED = "2026-01-01 00:00:01,000 ERROR inflight.engine.engine: a step of 3 sequences failed\n"
CRASH = """\
Signal (6) received.
 0# 0x0000562D1CA65DBD in tritonserver

"""


def _cause(tmp_path: Path, text: str, ready: int = 0) -> str:
    (tmp_path / "triton.log").write_text(text)
    return cause(tmp_path / "triton.log", ready)


@pytest.mark.parametrize(
    "line",
    [
        "2026-01-01 00:00:00,000 ERROR inflight.trtllm.engine: the GPU has gone",
        '{"time": "2026-01-01T00:00:00.000Z", "level": "error", "logger": "inflight.x", "message": "the GPU has gone"}',
        "inflight.errors.DeploymentError: the GPU has gone",
        'E0101 00:00:00.000000 7 main.cc:257] "the GPU has gone"',
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  the GPU has gone",
    ],
    ids=["text", "json", "deployment", "main", "exception"],
)
def test_the_line_that_says_it(tmp_path: Path, line: str) -> None:
    quoted = '2026-01-01 00:00:00,000 INFO inflight.requests: finished request_id="x ERROR inflight: forged"\n'
    after = "E0101 00:00:00.000000 7 model.cc:1] something after it\n"
    assert _cause(tmp_path, f"{NOISE}{quoted}{line}\n{after}{CRASH}{GONE}") == "the GPU has gone"


def test_an_exception_of_triton_comes_before_what_was_logged_earlier(tmp_path: Path) -> None:
    thrown = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
    assert _cause(tmp_path, NOISE + FAILED + thrown + CRASH) == "it got no memory (std::bad_alloc)"


def test_a_crash_without_a_word_has_no_cause(tmp_path: Path) -> None:
    """Neither what is in every log says why, nor a stack without names."""
    assert _cause(tmp_path, NOISE + "\n" + CRASH + GONE) == UNKNOWN
    assert _cause(tmp_path, CRASH) == _cause(tmp_path, "\n") == UNKNOWN


def test_once_it_was_ready_only_what_ends_a_server_is_its_cause(tmp_path: Path) -> None:
    start = NOISE + FAILED
    outlived = FAILED + "2026-01-01 00:00:01,000 ERROR inflight: a stage failed\n" + NOISE
    assert _cause(tmp_path, start + outlived + CRASH + GONE, len(start)) == UNKNOWN
    hang = "2026-01-01 00:00:02,000 ERROR inflight.trtllm.watchdog: TensorRT-LLM has made no progress for 60 s\n"
    ending = "2026-01-01 00:00:03,000 WARNING inflight: ending the server\n"
    assert _cause(tmp_path, start + hang + ending + FAILED, len(start)) == "TensorRT-LLM has made no progress for 60 s"


def test_a_signal_that_asks_for_an_end_in_order_is_no_crash(tmp_path: Path) -> None:
    """What is said after it counts: here, of clients that stayed for longer than the exit timeout."""
    late = "failed to stop server: Internal - Exit timeout expired. Exiting immediately."
    ended = f'Signal (15) received.\nE0101 00:00:00.000000 7 main.cc:535] "{late}"\nSignal (11) received.\n'
    assert _cause(tmp_path, NOISE + ended, len(NOISE)) == late


def test_what_an_exception_of_triton_means(tmp_path: Path) -> None:
    thrown = "  what():  boost::interprocess::lock_exception\n"
    said = "a stage that it waited for showed no sign of life (boost::interprocess::lock_exception)"
    assert _cause(tmp_path, NOISE + thrown + CRASH, len(NOISE)) == said


def test_a_name_in_the_stack_is_a_hint(tmp_path: Path) -> None:
    stack = " 1# 0x00007F9F7AC5A050 in /lib/libc.so.6\n 2# pthread_cond_wait in /lib/libc.so.6\n"
    named = " 3# triton::core::Run(int) in /opt/libtritonserver.so\n 4# triton::core::Start in /opt/x.so\n"
    crash = "Signal (11) received.\n"
    assert _cause(tmp_path, NOISE + crash + stack + named, len(NOISE)) == "its stack names triton::core::Run(int)"
    assert _cause(tmp_path, NOISE + crash + stack, len(NOISE)) == UNKNOWN


def test_the_log_of_a_crash_is_kept_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "triton.log"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for text in ("one", "two"):
        log.write_text(text)
        kept = keep(log, "crash-1.log")
        assert kept is not None
        assert kept.read_text() == text
        assert kept.stat().st_mode & 0o777 == 0o600
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert keep(log, "crash-1.log") is None


def test_a_user_without_a_home_directory_keeps_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton.log").touch()
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 2)  # nobody's
    assert keep(tmp_path / "triton.log", "crash-1.log") is None


def test_a_crash_that_is_told_again_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "triton.log"
    log.write_text("Signal (6) received.\nSignal (6) received.\n")
    watch = CrashWatch(log)
    for line, goes_on in {
        "before the watch\n": False,
        "Signal (15) received.\nSignal (2) received.\n": False,
        "a request's id: Signal (6) received.\nSignal (6) received. is its id\n": False,
        "Signal (11) received.\n": False,
        "Signal (6) rec": False,
        "eived.": False,
        "\n": True,
        "a stack\n": True,
    }.items():
        with log.open("a") as file:
            file.write(line)
        assert (watch.look() is not None) is goes_on, line


def test_a_long_log_begins_anew_and_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes it goes on at its end, and a crash is found that is told after that, or before and after it."""
    monkeypatch.setattr(log_module, "MOST_BYTES", 100)
    path, before = tmp_path / "triton.log", tmp_path / "triton.log.1"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"ready\n")
        watch = CrashWatch(path)
        writer.write(b"Signal (6) received.\n" + b"a" * 50 + b"\n")
        assert not log_module.bound(path)
        assert watch.look() is None
        writer.write(b"b" * 50 + b"\n")
        assert log_module.bound(path)
        assert (path.read_bytes(), len(before.read_bytes())) == (b"", 129)
        assert watch.look() is None
        writer.write(b"terminate called\n  what():  std::bad_alloc\nSignal (6) received.\n")
        end = watch.look()
    assert end is not None
    assert "it got no memory (std::bad_alloc)" in end.text
    assert path.read_bytes().startswith(b"terminate"), "it goes on at its beginning"
    before.unlink()
    before.mkdir()  # nothing can be written there
    path.write_bytes(b"c" * 200)
    assert log_module.bound(path)
    assert path.read_bytes() == b""
    path.unlink()  # somebody has removed it: what writes it goes on
    assert not log_module.bound(path)


def test_the_lines_of_the_stages_are_read_once_each_as_they_are_written(tmp_path: Path) -> None:
    first, second = tmp_path / "triton.log", tmp_path / "another.log"
    line = "2026-01-01 00:00:00,000 INFO inflight.text.tokenizer: reading the tokenizer\n"
    entry = '{"time": "x", "level": "warning", "logger": "inflight.precedence", "message": "end ids: 1 counts"}\n'
    first.write_text(NOISE + line + line + "2026-01-01 00:00:01,000 INFO uvicorn: up\n" + entry + '{"level": 1}\n[1]\n')
    log = StageLog()
    assert log.new_lines(first) == [
        StageLine("INFO", "reading the tokenizer"),
        StageLine("WARNING", "end ids: 1 counts"),
    ]
    with first.open("a") as file:
        file.write(line + "2026-01-01 00:00:02,000 INFO inflight.engine.shards: load")
        file.flush()
        assert log.new_lines(first) == []
        file.write("ing x\n")
    assert log.new_lines(first) == [StageLine("INFO", "loading x")]
    second.write_text(line + "2026-01-01 00:00:02,000 INFO inflight.engine.shards: loading y\n")
    assert log.new_lines(second) == [StageLine("INFO", "loading y")], "of a server that starts again, what is new"
