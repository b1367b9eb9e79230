"""The benchmark `recovery`: one process of a server is hurt, and the server comes back."""

from __future__ import annotations

import signal

import pytest

from benchmarks import recovery


@pytest.mark.proof
def test_streams_have_an_end_and_an_answer_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SIGNALS", (signal.SIGKILL,))
    monkeypatch.setattr(recovery, "VICTIMS", ("tensorrt_llm",))
    said: list[str] = []
    result = recovery.measure_recovery(8, said.append)
    [row] = result.rows
    # While this process had no processor, the server may have made all of a stream's answer.
    assert int(row["typed errors"]) + int(row["ended whole"]) == 8
    assert (row["no end"], row["kinds"]) == (0, "ServerUnreachable")
    assert row["cause that was said"] == "the stage tensorrt_llm ended on SIGKILL"
    assert 0 < float(row["running requests ended, s"]) < float(row["next good answer, s"])
    assert "0 streams had no end" in result.finding
    assert len(said) == 1
