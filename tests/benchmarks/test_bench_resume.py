"""The benchmark `resume`: a server is killed under streams, which go on as if nothing had happened."""

from __future__ import annotations

import pytest

from benchmarks import resume


@pytest.mark.proof
@pytest.mark.parametrize("setting", [resume.ONE, resume.REPLICAS])
def test_streams_go_on_with_the_very_tokens(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_WAVES", 1)
    monkeypatch.setattr(resume, "_KILLS", (1,))
    for seed in range(5):  # where this process stood still, a server may have made all answers before it was killed
        [wave] = resume.break_streams(setting, resume.make_asks(0, 12, seed), seed)
        assert [ask.error for ask in wave.asks] == [""] * 12
        for row in (wave.row(setting, http) for http in (False, True)):
            assert row["streams"] == 6
            assert {name: value for name, value in row.items() if name.startswith("other ") and value} == {}
        if any(ask.breaks for ask in wave.asks):
            return
    pytest.fail("no stream broke")
