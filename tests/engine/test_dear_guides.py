"""Sequences whose masks take long: they take turns, and leave the steps and the batch to others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from inflight.engine.guided import turns
from inflight.engine.guided.state import MaskBudget
from inflight.engine.guided.turns import ALONE_S, CHEAP_S, SHARE, MaskTurns
from inflight.engine.request import Output, new_stream_key
from inflight.sampling import Guide
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.driving import ask, load, run
from tests.engine.support.guiding import byte_tokenizer

PROMPT = tuple(range(40, 60))
STEP_S = 0.02


@dataclass(eq=False)
class Guided:
    """A guide whose masks take always as long."""

    mask_s: float
    total_s: float = 0.0
    had_turn: bool = False


@dataclass(eq=False)
class Running:
    """A sequence that decodes."""

    guide: Guided | None = None
    tokens: int = field(default=0)


def steps(sequences: list[Running], count: int, choice: MaskTurns | None = None) -> list[float]:
    """Run steps, and return what the masks of each took."""
    taken = list[float]()
    choice = choice or MaskTurns()
    known: list[Any] = [*sequences]
    choice.left_out([])
    choice.observe(STEP_S)
    for _ in range(count):
        left_out = choice.left_out(known)
        chosen = [one for one in sequences if one not in left_out]
        assert chosen, "a step does something"
        for one in chosen:
            one.tokens += 1
            if one.guide is not None:
                one.guide.total_s += one.guide.mask_s
        taken.append(sum(one.guide.mask_s for one in chosen if one.guide is not None))
        choice.observe(STEP_S + taken[-1])
    return taken


def test_dear_masks_take_a_share_of_a_step_beside_others() -> None:
    plain, dear = Running(), [Running(Guided(0.004)) for _ in range(30)]
    taken = steps([plain, *dear], 600)
    assert plain.tokens == 600
    assert sum(taken) == pytest.approx(600 * SHARE * STEP_S, rel=0.05)
    assert max(taken) <= SHARE * STEP_S + 0.004
    assert max(one.tokens for one in dear) - min(one.tokens for one in dear) <= 1, "each has its turn"


def test_who_takes_less_has_more_turns() -> None:
    plain, one, other = Running(), Running(Guided(0.002)), Running(Guided(0.02))
    steps([plain, one, other], 2000)
    assert one.tokens * 0.002 == pytest.approx(other.tokens * 0.02, rel=0.1)


def test_common_guides_are_never_left_out() -> None:
    common = [Running(Guided(CHEAP_S)) for _ in range(30)]
    steps([*common, Running(Guided(0.01))], 50)
    assert [one.tokens for one in common] == [50] * 30


def test_alone_dear_masks_take_so_long_that_a_newcomer_does_not_wait_long() -> None:
    dear = [Running(Guided(0.004)) for _ in range(30)]
    taken = steps(dear, 300)
    assert max(taken) <= ALONE_S + 0.004
    assert sum(taken) >= 300 * ALONE_S * 0.9
    assert max(one.tokens for one in dear) - min(one.tokens for one in dear) <= 1
    assert steps([Running(Guided(1.0))], 5) == [1.0] * 5, "one goes on, whatever it takes"


def test_a_late_dear_sequence_does_not_overtake_by_what_others_had() -> None:
    choice, first = MaskTurns(), Running(Guided(0.004))
    steps([Running(), first], 400, choice)
    late = Running(Guided(0.004))
    before = first.tokens
    steps([Running(), first, late], 400, choice)
    assert abs(first.tokens - before - late.tokens) <= 1


def test_dear_sequences_that_come_and_go_starve_nobody() -> None:
    """Each of the others has one cheap mask and one dear one, and then another takes its place."""
    choice, victim = MaskTurns(), Running(Guided(0.0003))
    steps([Running(), victim], 2, choice)
    others, before = [Running(Guided(0.0001)) for _ in range(2)], victim.tokens
    for _ in range(400):
        steps([Running(), victim, *others], 1, choice)
        for place, one in enumerate(others):
            assert one.guide is not None
            if one.tokens and one.guide.mask_s < 0.002:
                one.guide.mask_s = 0.002
            elif one.tokens > 1:
                others[place] = Running(Guided(0.0001))
    assert victim.tokens - before > 100


def test_a_busy_machine_teaches_little() -> None:
    choice, dear = MaskTurns(), Running(Guided(0.004))
    known: list[Any] = [Running(), dear]
    for seconds in (STEP_S, 10.0):
        choice.left_out(known)
        choice.observe(seconds)
    assert sum(steps([Running(), dear], 100, choice)) < 100 * SHARE * 1.0


def test_a_token_counts_with_the_mask_behind_it() -> None:
    budget = MaskBudget(1.0)
    budget.charge(0.1)
    assert budget.cost_s == pytest.approx(0.05)
    budget.count_token(0.2)
    budget.charge(0.1)
    assert budget.cost_s == pytest.approx((0.05 + 0.3) / 2)
    assert budget.total_s == pytest.approx(0.4)


def test_a_full_batch_of_dear_guides_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each guide counts as dear here. What has left the batch goes on with the tokens that it would have had."""
    monkeypatch.setattr(turns, "CHEAP_S", 0.0)
    monkeypatch.setattr(turns, "ALONE_S", 0.0)
    engine = load(checkpoint("llama"), byte_tokenizer(), max_batch_size=2, mode="inflight", prefix_reuse=True)
    guided = [ask(PROMPT, 24, guide=Guide("regex", f"[ab{index}]{{40}}")) for index in range(2)]
    alone = [run(engine, [replace(one, key=new_stream_key())]).popitem()[1].tokens for one in guided]
    for one in guided:
        engine.submit(one)
    outputs = {one.key: Output(one.key) for one in guided}
    newcomer, ended = ask(PROMPT, 4), list[int]()
    while engine.busy:
        for output in engine.step():
            outputs.setdefault(output.key, Output(output.key)).extend(output)
            ended += [output.key] if output.finished else []
        if len(outputs) == 2 and all(output.tokens for output in outputs.values()):
            engine.submit(newcomer)
            outputs[newcomer.key] = Output(newcomer.key)
    assert ended[0] == newcomer.key
    assert [outputs[one.key].tokens for one in guided] == alone
    assert engine._scheduler.preemptions >= 1
