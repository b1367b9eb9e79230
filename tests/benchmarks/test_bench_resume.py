"""The benchmark `resume`: a server is killed under streams, which go on as if nothing had happened."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks import resume
from benchmarks.resume_asks import GREEDY, OPENAI, PROTOCOLS, SAMPLED, make_asks


@pytest.mark.proof
@pytest.mark.parametrize("setting", [resume.ONE, resume.REPLICAS])
def test_streams_go_on_with_the_very_tokens(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_WAVES", 1)
    monkeypatch.setattr(resume, "_KILLS", (1,))
    for seed in range(5):  # where this process stood still, a server may have made all answers before it was killed
        [wave] = resume.break_streams(setting, make_asks(0, 18, seed), seed)
        assert [ask.error for ask in wave.asks] == [""] * 18
        for protocol, sampling in product(PROTOCOLS, (GREEDY, SAMPLED)):
            row = wave.row(setting, protocol, sampling)
            assert row["streams"] == (2 if sampling == GREEDY else 4)
            assert {name: value for name, value in row.items() if name.startswith("other ") and value} == {}
        broken = {ask.protocol for ask in wave.asks if ask.breaks and ask.protocol != OPENAI}
        broken |= {OPENAI} if wave.resumed else set()
        if broken == set(PROTOCOLS):
            return
    pytest.fail(f"only streams of {broken} broke")
