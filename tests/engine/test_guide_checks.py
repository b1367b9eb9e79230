"""The check of guides in a process of its own: it may hang, crash or take too much, and ends its own request alone."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from inflight.engine.guided import check_process_handle
from inflight.engine.guided.check_process_handle import CheckProcess
from inflight.engine.guided.compiler import CompiledGuide, GuideCompiler
from inflight.engine.guided.vocabulary import Vocabulary
from inflight.errors import EngineFailure, InvalidRequest, QueueFull
from inflight.sampling import Guide
from inflight.settings.guided import GuidedDecodingSettings
from tests.engine.support.checkpoints import VOCAB
from tests.engine.support.guiding import COMPILE_WAIT_S, byte_tokenizer, guide_compiler, regex, result_of


def _handle(compiler: GuideCompiler) -> CheckProcess:
    """Return the handle of a compiler's first process."""
    return compiler._worker._processes[0]


def _pid(compiler: GuideCompiler) -> int:
    process = _handle(compiler)._process
    assert process is not None
    return process.pid


@contextmanager
def _hanging(compiler: GuideCompiler) -> Iterator[tuple[int, threading.Event]]:
    """Make the compiler's process stand still, as a guide that hangs does.

    Yield its id, and an event: that it has been sent a guide.
    """
    connection = _handle(compiler)._connection
    assert connection is not None
    sent, send = threading.Event(), connection.send

    def noted(guide: Guide) -> None:
        send(guide)
        sent.set()

    connection.send = noted  # type: ignore[method-assign]
    os.kill(pid := _pid(compiler), signal.SIGSTOP)
    yield pid, sent


@contextmanager
def _clock_limit(seconds: float) -> Iterator[None]:
    """Limit what a check takes by the clock; a busy machine may need more for the checks that follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_process_handle, "_CLOCK_FACTOR", 0)
        patch.setattr(check_process_handle, "_CLOCK_MORE_S", seconds)
        yield


@pytest.mark.proof
def test_a_check_that_does_not_end_is_ended_and_the_next_one_works() -> None:
    """A process that stands still takes no CPU time, so it may be the machine's fault: the request may come again."""
    compiler = guide_compiler()
    with _hanging(compiler) as (pid, _), _clock_limit(5):
        said = result_of(compiler, compiler.ask(regex("a")))
    assert isinstance(said, QueueFull)
    assert _pid(compiler) == pid
    assert isinstance(result_of(compiler, compiler.ask(regex("b"))), CompiledGuide)
    assert _pid(compiler) != pid
    assert isinstance(result_of(compiler, compiler.ask(regex("a"))), CompiledGuide), "it is tried again"


@pytest.mark.proof
def test_a_process_that_reads_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the connection takes in: first of a guide, then of the tokens at the start."""
    compiler = guide_compiler()
    with _hanging(compiler), _clock_limit(5):
        assert isinstance(result_of(compiler, compiler.ask(regex("a" * (4 << 20)))), QueueFull)
    monkeypatch.setattr(check_process_handle, "_START_S", 1)
    monkeypatch.setattr(check_process_handle, "_spawn", _spawn_sleeper)
    tokens: Any = bytes(4 << 20)
    handle = CheckProcess(tokens, GuidedDecodingSettings())
    assert isinstance(handle.check(regex("a")), EngineFailure)
    handle.close()


def _spawn_sleeper(connection: Connection) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", str(COMPILE_WAIT_S)], pass_fds=[connection.fileno()])


@pytest.mark.proof
def test_a_check_that_takes_too_much_cpu_time_is_given_up_and_not_tried_again_at_once() -> None:
    compiler = guide_compiler(compile_timeout_s=0.3)
    guide = Guide(
        "structural_tag", json.dumps({"format": {"type": "or", "elements": [_tag(one) for one in range(4000)]}})
    )
    said = result_of(compiler, compiler.ask(guide))
    assert "guided_decoding_guide takes more than 0.3 s of CPU time to compile" in str(said)
    again = compiler.ask(guide)
    assert again.result is said
    again.kept_until_s = time.monotonic()
    other = compiler.ask(guide)
    assert other is not again
    assert isinstance(result_of(compiler, compiler.ask(regex("a"))), CompiledGuide)


def _tag(number: int) -> dict[str, Any]:
    """Return a format whose check takes a millisecond or more."""
    elements = [{"type": "regex", "pattern": "[a-z]*"}, {"type": "const_string", "value": f"<{number}>"}]
    return {"type": "sequence", "elements": [*elements, {"type": "json_schema", "json_schema": {}}]}


def test_time_in_which_a_check_does_nothing_does_not_count() -> None:
    compiler = guide_compiler(compile_timeout_s=1)
    with _hanging(compiler) as (pid, _), _clock_limit(COMPILE_WAIT_S):
        asked = compiler.ask(regex("a"))
        assert not asked.done.wait(1.5)
        os.kill(pid, signal.SIGCONT)
        assert isinstance(result_of(compiler, asked), CompiledGuide)


def test_one_client_does_not_hold_all_threads() -> None:
    compiler = guide_compiler(compile_threads=2)
    with _hanging(compiler) as (pid, sent):
        first = compiler.ask(regex("a"), "busy")
        assert sent.wait(COMPILE_WAIT_S)
        second, shared = (compiler.ask(regex(text), "busy") for text in "bc")
        assert isinstance(result_of(compiler, compiler.ask(regex("d"), "other")), CompiledGuide)
        assert isinstance(result_of(compiler, compiler.ask(regex("e"))), CompiledGuide), "no client is known"
        assert compiler.ask(regex("c"), "other") is shared
        assert isinstance(result_of(compiler, shared), CompiledGuide), "two clients wait for it"
        assert list(compiler._worker._queue) == [second]
        assert not first.done.is_set()
        os.kill(pid, signal.SIGCONT)
    assert isinstance(result_of(compiler, second), CompiledGuide)


def test_a_compilation_that_crashes_ends_its_request_alone() -> None:
    compiler = guide_compiler()
    with _hanging(compiler) as (pid, sent):
        crashed, after = compiler.ask(regex("a")), compiler.ask(regex("b"))
        assert sent.wait(COMPILE_WAIT_S)
        os.kill(pid, signal.SIGKILL)
    assert isinstance(result_of(compiler, after), CompiledGuide)
    said = result_of(compiler, crashed)
    assert isinstance(said, InvalidRequest)
    assert "guided_decoding_guide cannot be compiled" in str(said)


def test_a_process_that_has_ended_meanwhile_is_started_again() -> None:
    compiler = guide_compiler()
    handle = _handle(compiler)
    assert handle._process is not None
    handle._process.kill()
    handle._process.wait()
    assert isinstance(result_of(compiler, compiler.ask(regex("a"))), CompiledGuide)


def test_what_nobody_waits_for_leaves_the_queue_and_a_full_queue_refuses() -> None:
    compiler = guide_compiler(compile_queue=2)
    with _hanging(compiler) as (pid, sent):
        first = compiler.ask(regex("a"))
        assert sent.wait(COMPILE_WAIT_S)
        queued = [compiler.ask(regex(text)) for text in "bcd"]
        assert isinstance(compiler.result(queued[2]), QueueFull)
        assert compiler.ask(regex("b")) is queued[0]
        for _ in range(2):
            compiler.give_up(queued[0])
        assert list(compiler._worker._queue) == [queued[1]]
        again = compiler.ask(regex("d"))
        assert compiler.result(again) is None
        compiler.give_up(first)
        os.kill(pid, signal.SIGCONT)
    assert isinstance(result_of(compiler, again), CompiledGuide)
    assert isinstance(compiler.result(queued[1]), CompiledGuide)
    assert queued[0].result is None
    assert isinstance(result_of(compiler, compiler.ask(regex("b"))), CompiledGuide)


def test_the_process_ends_with_the_compiler() -> None:
    compiler = guide_compiler()
    handle = _handle(compiler)
    process = handle._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    compiler.ask(regex("a"))
    del compiler, handle
    gc.collect()
    assert process.poll() == -signal.SIGKILL


def test_the_process_ends_when_the_one_that_started_it_has_ended() -> None:
    compiler = guide_compiler()
    handle = _handle(compiler)
    assert handle._process is not None
    assert handle._connection is not None
    handle._connection.close()
    assert handle._process.wait(COMPILE_WAIT_S) == 0


def test_a_process_that_does_not_start_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    compiler = GuideCompiler(lambda: Vocabulary(byte_tokenizer(), VOCAB), GuidedDecodingSettings())
    said = result_of(compiler, compiler.ask(regex("a")))
    assert isinstance(said, EngineFailure)
    monkeypatch.undo()
    assert isinstance(result_of(compiler, compiler.ask(regex("a"))), CompiledGuide)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not say what a process has")
def test_the_process_can_take_a_limited_amount_of_memory() -> None:
    code = (
        "from inflight.engine.guided.check_process import _MEMORY_BYTES, _limit_memory\n"
        "_limit_memory()\n"
        "bytearray(_MEMORY_BYTES // 2)\n"
        "try:\n    bytearray(2 * _MEMORY_BYTES)\nexcept MemoryError:\n    print('refused')"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "refused\n"
