"""Random storms: 300 requests of all kinds come, wait, are preempted, cancelled or late, and end exactly once."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from inflight.clock import now_ns
from inflight.engine.engine import Engine
from inflight.engine.loop import EngineLoop
from inflight.engine.request import FinishReason, Output, Request
from inflight.errors import DeadlineExceeded
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import Collector, ask, assert_idle, load, run

COUNT = 300


@dataclass
class Storm:
    """What was sent, what came of it, and who was told to stop."""

    name: str
    chance: random.Random
    sent: list[Request] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    outputs: dict[int, list[Output]] = field(default_factory=dict)

    def request(self, prompts: list[list[int]]) -> Request:
        """Return one at random: greedy or seeded, urgent or not, some too late before they start."""
        chance, kind = self.chance, {}
        if chance.random() < 0.3:
            kind = {"temperature": 1.3, "top_p": 0.9, "seed": chance.randrange(4)}
        late = now_ns() - 1 if chance.random() < 0.05 else None
        kind |= {"deadline_ns": late, "priority": chance.randint(0, 2), "log_probs": chance.random() < 0.2}
        self.sent.append(ask(chance.choice(prompts), chance.randint(1, 10), **kind))
        return self.sent[-1]

    def take(self, outputs: list[Output]) -> None:
        """Check that nothing comes after the last output."""
        assert len({output.key for output in outputs}) == len(outputs), "two outputs of one sequence in one step"
        for output in outputs:
            own = self.outputs.setdefault(output.key, [])
            assert not (own and own[-1].finished), "an output came after the last one"
            own.append(output)

    def check(self) -> None:
        """Every request has ended, as it should."""
        assert set(self.outputs) == {request.key for request in self.sent}
        for request in self.sent:
            own = self.outputs[request.key]
            last, tokens = own[-1], [token for output in own for token in output.tokens]
            assert last.finished
            expected = _alone(self.name, request)
            if isinstance(last.error, DeadlineExceeded):
                assert request.deadline_ns is not None
                assert not tokens
            elif last.finish_reason is FinishReason.CANCELLED:
                assert request.key in self.cancelled
                assert tokens == expected[: len(tokens)]
            else:
                assert last.error is None
                assert last.finish_reason is FinishReason.LENGTH
                assert tokens == expected, "not what it would have got alone"
            if request.sampling.log_probs:
                assert sum(len(output.log_probs or ()) for output in own) == len(tokens)


_seeded: dict[tuple[Any, ...], list[int]] = {}
_quiet: dict[str, Engine] = {}


def _alone(name: str, request: Request) -> list[int]:
    """Return what a request gets alone: of transformers if greedy, else of an engine that does nothing else."""
    sampling = request.sampling
    if sampling.greedy:
        return greedy(name, tuple(request.prompt), 10)[: sampling.max_tokens]
    key = (name, tuple(request.prompt), sampling.seed)
    if key not in _seeded:
        engine = _quiet.setdefault(name, load(checkpoint(name), prefix_reuse=False))
        same = ask(request.prompt, 10, temperature=1.3, top_p=0.9, seed=sampling.seed)
        _seeded[key] = run(engine, [same]).popitem()[1].tokens
    return _seeded[key][: sampling.max_tokens]


def _prompts(chance: random.Random) -> list[list[int]]:
    """Some share prefixes that end within a block, some are equal but for their last token."""
    base = [chance.randrange(1, 9) for _ in range(30)]
    prompts = [[chance.randrange(1, 20) for _ in range(chance.randint(1, 24))] for _ in range(6)]
    shared = [[*base[: chance.randint(1, 30)], chance.randrange(1, 20)] for _ in range(8)]
    return prompts + shared


@pytest.mark.proof
@pytest.mark.sweep(most=3)
@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
@pytest.mark.parametrize(("name", "seed"), [("llama", 11), ("gemma3", 12), ("mistral", 13)])
def test_a_storm(name: str, seed: int, policy: str) -> None:
    storm = Storm(name, random.Random(seed))
    engine = load(checkpoint(name), num_blocks=24, max_batch_size=12, max_tokens_per_step=20, policy=policy)
    prompts = _prompts(storm.chance)
    while len(storm.sent) < COUNT or engine.busy:
        for _ in range(min(COUNT - len(storm.sent), storm.chance.randint(0, 5))):
            engine.submit(storm.request(prompts))
        if storm.sent and storm.chance.random() < 0.25:
            victim = storm.chance.choice(storm.sent).key
            storm.cancelled.add(victim)
            engine.cancel(victim)
        storm.take(engine.step())
        engine._cache.check()
    storm.check()
    assert_idle(engine)
    _assert_stormy(storm, policy)


def _assert_stormy(storm: Storm, policy: str) -> None:
    """What the storm is for did happen."""
    lasts = [own[-1] for own in storm.outputs.values()]
    metrics = [last.metrics for last in lasts if last.metrics is not None]
    assert len(metrics) == COUNT
    assert any(one.cached_tokens % 4 for one in metrics), "no partly equal block was copied"
    assert sum(one.cached_tokens > 0 for one in metrics) > 50
    assert (sum(one.preemptions for one in metrics) > 10) == (policy == "max_utilization")
    assert sum(last.finish_reason is FinishReason.CANCELLED for last in lasts) > 10
    assert any(isinstance(last.error, DeadlineExceeded) for last in lasts)


@pytest.mark.proof
def test_a_storm_from_several_threads() -> None:
    """Through the loop: clients submit and cancel from their own threads; each request ends once."""
    engine, collect = load(checkpoint("llama"), num_blocks=24, policy="max_utilization"), Collector()
    loop = EngineLoop(engine, collect, max_queue_size=COUNT)
    storms = [Storm("llama", random.Random(seed)) for seed in range(4)]
    prompts = _prompts(random.Random(1))

    def client(storm: Storm) -> None:
        for _ in range(40):
            loop.submit(storm.request(prompts))
            if storm.chance.random() < 0.3:
                victim = storm.chance.choice(storm.sent).key
                storm.cancelled.add(victim)
                loop.cancel(victim)

    threads = [threading.Thread(target=client, args=(storm,)) for storm in storms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for storm in storms:
        collect.wait(*storm.sent)
    loop.close()
    for storm in storms:
        keys = {request.key for request in storm.sent}
        for output in collect.outputs:
            if output.key in keys:
                storm.take([output])
        storm.check()
    assert_idle(engine)
