"""The soak of a server: it asks the same for the same seed, and finds what it looks for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from benchmarks.server_soak.processes import Held, Sample
from benchmarks.server_soak.report import faults, growth_mib, results
from benchmarks.server_soak.run import Soaked
from benchmarks.server_soak.session import WRONG, _ended, _failed
from benchmarks.server_soak.traffic import KINDS, REFUSED, Ask, Traffic
from inflight.client.answer import Chunk
from inflight.client.request import Request
from inflight.errors import DeadlineExceeded, EngineFailure, InvalidRequest

MIB = 2**20
STAGES = ("triton", "tokenizer", "tensorrt_llm", "detokenizer")


def _ask(kind: str = "plain", sequences: int = 1) -> Ask:
    return Ask(kind, "grpc", Request({"text_input": ["x"]}, "an-id", sequences))


def _soaked(growth: float = 0.0, **more: Any) -> Soaked:
    """A soak of 100 samples: the engine warms up in the first tenth, and grows by so many MiB over the whole."""
    samples = []
    for place in range(100):
        engine = int((400 + min(place, 10) * 10 + growth * place / 100) * MIB)
        sizes = {name: engine if name == "tensorrt_llm" else 50 * MIB for name in STAGES}
        held = {name: Held(uss, engine, 20, 10, 7, 5.0 * place) for name, uss in sizes.items()}
        samples.append(Sample(5.0 * place, held, 4 * MIB, place))
    plain = Soaked(500.0, Counter({("plain", "stop"): 90, ("plain", "left"): 10}), [], samples, "", 3.0, 0, "")
    for name, value in more.items():
        setattr(plain, name, value)
    return plain


def test_the_same_seed_asks_the_same_and_every_kind_comes() -> None:
    one, other = Traffic(3), Traffic(3)
    asks = [one.draw() for _ in range(400)]
    assert asks == [other.draw() for _ in range(400)]
    assert {ask.kind for ask in asks} == set(KINDS)
    assert {ask.over for ask in asks} == {"grpc", "http"}
    assert {ask.leaves for ask in asks} == {"", "closes", "stops"}
    lengths = {len(str(ask.request.inputs.get("text_input"))) for ask in asks}
    assert len(lengths) > 250, "lengths repeat"
    assert len({ask.request.id for ask in asks}) == len(asks)


@pytest.mark.parametrize(
    ("sequences", "reasons", "how"),
    [
        (1, [(0, None), (0, "stop")], "stop"),
        (2, [(0, None), (1, "length"), (0, "stop")], "stop"),
        (1, [(0, None), (0, None)], WRONG),
        (1, [], WRONG),
        (1, [(0, "stop"), (0, "stop")], WRONG),
        (1, [(0, "stop"), (0, None)], WRONG),
        (2, [(0, None), (0, "stop"), (1, None)], WRONG),
    ],
)
def test_each_sequence_ends_once_with_a_reason(sequences: int, reasons: list[tuple[int, str | None]], how: str) -> None:
    chunks = [Chunk("a", index, reason) for index, reason in reasons]
    end = _ended(_ask(sequences=sequences), chunks)
    assert end.how == how
    assert bool(end.detail) == (how == WRONG)


@pytest.mark.parametrize(
    ("kind", "error", "how"),
    [
        (REFUSED, InvalidRequest("no"), "refused"),
        (REFUSED, EngineFailure("no"), WRONG),
        ("plain", InvalidRequest("no"), WRONG),
        ("deadline", DeadlineExceeded("late"), "deadline"),
        ("plain", DeadlineExceeded("late"), WRONG),
    ],
)
def test_only_what_was_asked_for_may_fail(kind: str, error: Exception, how: str) -> None:
    assert _failed(_ask(kind), error).how == how


def test_what_must_be_refused_and_is_answered_is_wrong() -> None:
    assert _ended(_ask(REFUSED), [Chunk("a", 0, "stop")]).how == WRONG


def test_a_warm_up_is_no_growth() -> None:
    assert growth_mib(_soaked(), "tensorrt_llm") == 0
    assert not faults(_soaked())


@pytest.mark.parametrize(
    ("soaked", "told"),
    [
        (_soaked(growth=100), "engine grew by 50 MiB"),
        (_soaked(wrong=[{"detail": "no end"}]), "1 requests ended wrong"),
        (_soaked(books="3 blocks are free"), "3 blocks are free"),
        (_soaked(stop_s=30.2, exit_code=1), "took 30.2 s to stop, with code 1"),
    ],
)
def test_faults_are_told(soaked: Soaked, told: str) -> None:
    assert told in "; ".join(faults(soaked))
    assert told in results(soaked)[0].finding


def test_a_stage_that_is_gone_is_a_fault() -> None:
    soaked = _soaked()
    last = soaked.samples[-1]
    soaked.samples[-1] = Sample(last.at_s, {name: last.processes[name] for name in STAGES[:3]}, 0, 100)
    assert "the process of detokenizer is gone" in faults(soaked)
    assert results(soaked)[0].figure is not None
