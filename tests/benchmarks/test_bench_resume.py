"""The benchmark `resume`: a server is killed under streams, which go on as if nothing had happened."""

from __future__ import annotations

import pytest

from benchmarks import resume


@pytest.mark.proof
def test_streams_go_on_with_the_very_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_KILLS", 1)
    for seed in range(5):  # where this process stood still, a server may have made all answers before it was killed
        said: list[str] = []
        result = resume.measure_resume(8, seed, said.append)
        assert [row["protocol"] for row in result.rows] == ["gRPC", "HTTP"]
        assert sum(int(row["streams"]) for row in result.rows) == 8
        assert len(said) == 1, "no stream ended with an error"
        for row in result.rows:
            assert {name: value for name, value in row.items() if name.startswith("other ") and value} == {}
            assert row["errors"] == 0
        if any(row["breaks"] for row in result.rows):
            break
    else:
        pytest.fail("no stream broke")
    assert "there were 0 differences" in result.finding
