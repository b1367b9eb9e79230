"""Why a server ended, as its log has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.serve.log import cause

NOISE = """\
W0101 00:00:00.000000 7 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
E0101 00:00:00.000000 7 server.cc:241] "CudaDriverHelper has not been initialized."
I0101 00:00:00.000000 7 model_lifecycle.cc:472] "loading: tokenizer:1"
"""
GONE = "2026-01-01 00:00:02,000 ERROR inflight.triton.orphan: the server has gone, and the stage with it\n"
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
    assert _cause(tmp_path, NOISE + FAILED + thrown + CRASH) == "std::bad_alloc"


def test_a_crash_without_a_word_leaves_what_came_last(tmp_path: Path) -> None:
    """Neither Triton's stack trace nor what is in every log says why."""
    assert _cause(tmp_path, NOISE + "\n" + CRASH + GONE).endswith('cc:472] "loading: tokenizer:1"')
    assert _cause(tmp_path, CRASH) == _cause(tmp_path, "\n") == "its log does not say why"


def test_once_it_was_ready_the_last_error_counts_and_none_of_the_start(tmp_path: Path) -> None:
    start = NOISE + FAILED.replace("3 sequences", "1 sequences")
    assert (
        _cause(tmp_path, start + FAILED + FAILED.replace("3", "4") + GONE, len(start)) == "a step of 4 sequences failed"
    )
    assert _cause(tmp_path, start, len(start)) == "its log does not say why"
