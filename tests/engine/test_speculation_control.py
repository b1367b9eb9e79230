"""The controller, against an engine whose times and chances are known; and prompt lookup."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from inflight.engine.request import Request
from inflight.engine.sequence import Sequence
from inflight.engine.speculate.controller import Acceptance, Controller, StepTime
from inflight.engine.speculate.ngram import NgramDrafter
from inflight.engine.speculate.verification import ancestry, merge, walk
from inflight.sampling import SamplingParams
from tests.engine.support.checkpoints import PROMPTS, checkpoint
from tests.engine.support.driving import ask, load, run
from tests.engine.support.speculating import speculating
from tests.support.tables import each_row


def sequence(tokens: list[int]) -> Sequence:
    """Return a sequence that has these tokens."""
    return Sequence(Request(tokens, SamplingParams(max_tokens=1000)), 0, 0, 100_000, None)


@dataclass
class World:
    """An engine whose times are known, in milliseconds, and a drafter whose chance is."""

    fixed: float
    per_token: float
    per_draft: float
    chance: float
    noise: float = 0.0
    per_pass: float = 0.0
    disturbed: int | None = None
    """A step, drafting included, that takes ten times as long."""

    def __post_init__(self) -> None:
        self.luck = random.Random(3)

    def run(self, controller: Controller, batch: int, steps: int) -> tuple[float, float]:
        """Let the controller decide for so many steps; return tokens per millisecond, and drafts per sequence."""
        sequences = [sequence([1, 2]) for _ in range(batch)]
        tokens = drafted = seconds = 0.0
        for place in range(steps):
            lengths = controller.lengths(dict.fromkeys(sequences, 8), batch, batch)
            slower = 10 if place == self.disturbed else 1
            size = batch + sum(lengths.values())
            drafting = self.per_draft * sum(lengths.values()) + self.per_pass * max(lengths.values(), default=0)
            controller.observe_drafting(lengths.values(), slower * drafting)
            step = slower * (self.fixed + self.per_token * size) * (1 + self.noise * self.luck.random())
            controller.step_time.observe(size, step)
            for one, length in lengths.items():
                accepted = next((place for place in range(length) if self.luck.random() > self.chance), length)
                controller.count(one, length, accepted)
                tokens += accepted
            tokens, drafted, seconds = tokens + batch, drafted + size - batch, seconds + drafting + step
        return tokens / seconds, drafted / steps / batch

    def best(self, batch: int) -> float:
        """Return the most tokens per millisecond that any fixed number of drafts gives."""
        return max(
            batch * sum(self.chance**place for place in range(count + 1))
            / (self.fixed + self.per_pass * count + batch * (self.per_token * (count + 1) + self.per_draft * count))
            for count in range(9)
        )  # fmt: skip


@pytest.mark.proof
@each_row("noise", [0.0, 0.4])
@each_row("batch", [1, 4, 32])
@each_row("chance", [0.05, 0.5, 0.8, 0.97])
@each_row(("per_token", "per_draft"), [(0.02, 0.0), (0.02, 0.3), (0.3, 0.0), (0.3, 0.1)])
def test_it_comes_close_to_the_best_number_of_drafts(
    per_token: float, per_draft: float, chance: float, batch: int, noise: float
) -> None:
    world = World(1.0, per_token, per_draft, chance, noise)
    controller = Controller(8)
    world.run(controller, batch, 100)
    speed, _ = world.run(controller, batch, 400)
    assert speed > 0.9 * world.best(batch) / (1 + noise / 2)


@pytest.mark.proof
@each_row("disturbed", [0, 1, 2, 3, 5, 20])
@each_row("times", [(1.0, 0.02, 0.02), (1.0, 0.15, 0.1), (4.8, 0.21, 0.02)])
@each_row("batch", [1, 8])
def test_one_disturbed_step_turns_nothing_on_or_off(
    times: tuple[float, float, float], batch: int, disturbed: int
) -> None:
    drafted = []
    for step in (None, disturbed):
        world, controller = World(*times, 0.8, disturbed=step), Controller(8)
        world.run(controller, batch, 24)
        world.disturbed = None
        drafted.append(world.run(controller, batch, 100)[1])
    assert drafted[0] == pytest.approx(drafted[1], rel=0.2, abs=0.5)


def test_a_pass_of_the_draft_model_is_shared_by_the_batch() -> None:
    """What drafting costs one stream is no measure of what it costs eight: it goes on where it pays."""
    world, controller = World(4.8, 0.21, 0.02, 0.9, per_pass=1.5), Controller(8)
    for batch in (1, 8, 1, 16):
        world.run(controller, batch, 100)
        speed, _ = world.run(controller, batch, 300)
        assert speed > 0.85 * world.best(batch)


def test_it_stops_where_drafts_are_wrong_and_where_the_batch_is_large() -> None:
    cheap, dear = World(1.0, 0.15, 0.05, 0.05), World(1.0, 0.3, 0.1, 0.8)
    wrong, large = Controller(8), Controller(8)
    assert [cheap.run(wrong, 1, 300)[1] for _ in range(2)][1] < 0.25
    drafts = [dear.run(large, batch, 300)[1] for batch in (1, 32, 1)]
    assert drafts[0] > 2
    assert drafts[1] < 0.2
    assert drafts[2] > 2, "when the batch is small again it goes on"


def test_it_tells_a_sequence_whose_drafts_are_right_from_one_whose_are_not() -> None:
    controller, luck = Controller(6), random.Random(1)
    good, bad = sequence([1]), sequence([2])
    for _ in range(60):
        lengths = controller.lengths({good: 6, bad: 6}, 2, 2)
        controller.observe_drafting(lengths.values(), 0.01 * sum(lengths.values()))
        controller.step_time.observe(2 + sum(lengths.values()), 1.0 + 0.15 * sum(lengths.values()))
        if good in lengths:
            controller.count(good, lengths[good], lengths[good] if luck.random() < 0.9 else 0)
        if bad in lengths:
            controller.count(bad, lengths[bad], 0)
    lengths = controller.lengths({good: 6, bad: 6}, 2, 2)
    assert lengths[good] >= 3
    assert lengths.get(bad, 0) == 0
    controller.forget(good)
    controller.forget(bad)
    assert not controller._of_sequence


def test_not_adaptive_is_always_all() -> None:
    controller = Controller(5, adaptive=False)
    one, other = sequence([1]), sequence([2])
    for _ in range(50):
        assert controller.lengths({one: 9, other: 2, sequence([3]): 0}, 3, 3) == {one: 5, other: 2}
        controller.count(one, 5, 0)


def test_the_line_of_step_times_forgets_and_bears_with_disturbed_steps() -> None:
    line, luck = StepTime(), random.Random(2)
    for step in range(900):
        tokens = luck.randint(1, 20)
        slope = 0.1 if step < 400 else 0.3
        line.observe(tokens, 1.0 + slope * tokens + (50.0 if step % 97 == 90 else 0.0))
        if step == 380:
            assert line.per_token == pytest.approx(0.1, abs=0.06)
    assert line.per_token == pytest.approx(0.3, abs=0.12)


def test_behind_the_first_wrong_draft_nothing_is_learnt() -> None:
    acceptance = Acceptance()
    acceptance.count(5, 2)
    assert (acceptance.accepted, acceptance.tried) == (2, 3)
    acceptance.count(5, 5)
    assert acceptance.tried == pytest.approx(0.97 * 3 + 5)


def test_a_chance_that_is_hardly_known_is_seen_with_favour() -> None:
    known, faded = Acceptance(5, 10), Acceptance(5, 10)
    for _ in range(40):
        faded.fade()
    assert 0.5 < known.chance(0.5) < faded.chance(0.5) < Acceptance().chance(0.5) < 0.7


@each_row(
    ("tokens", "count", "expected"),
    [
        ([5, 6, 7, 8, 9, 5, 6, 7], 2, [8, 9]),
        ([5, 6, 7, 1, 6, 7, 2, 5, 6, 7], 1, [1]),  # the longest n-gram, not the latest short one
        ([6, 7, 1, 6, 7, 2, 6, 7], 3, [2, 6, 7]),  # of equal ones the latest
        ([1, 2, 1, 2, 1], 5, [2, 1, 2, 1, 2]),  # runs into the end: goes on with the period
        ([4, 4], 3, [4, 4, 4]),
        ([1, 2, 3], 4, []),
        ([9], 4, []),
        ([256, 1, 65536, 7, 1], 2, [65536, 7]),  # bytes of a token and its neighbour are no token
        ([0x01000000, 0x00000001, 5, 1], 2, [5, 1]),
    ],
)
def test_prompt_lookup(tokens: list[int], count: int, expected: list[int]) -> None:
    one, drafter = sequence(tokens[:1]), NgramDrafter(3)
    for token in tokens[1:]:
        drafter.prepare({one: count})
        one.tokens.append(token)
    drafter.prepare({one: count})
    assert drafter.draft({one: count}) == {one: [expected] if expected else []}
    drafter.forget(one)
    drafter.check_idle()


def test_prompt_lookup_is_what_a_plain_search_finds() -> None:
    luck = random.Random(4)
    for _ in range(300):
        tokens = [luck.randrange(4) << luck.choice((0, 8, 16)) for _ in range(luck.randint(1, 40))]
        size, count = luck.randint(1, 4), luck.randint(1, 5)
        one, drafter = sequence(tokens), NgramDrafter(size)
        drafter.prepare({one: count})
        assert next(iter(drafter.draft({one: count})[one]), []) == _plain(tokens, size, count)


def test_several_guesses_of_prompt_lookup_begin_with_different_tokens() -> None:
    one = sequence([6, 7, 1, 6, 7, 2, 5, 7, 3, 6, 7])
    for candidates, expected in ((1, [[2, 5]]), (2, [[2, 5], [1, 6]]), (4, [[2, 5], [1, 6], [3, 6]])):
        drafter = NgramDrafter(2, candidates)
        drafter.prepare({one: 2})
        assert drafter.draft({one: 2})[one] == expected


def test_a_tree_holds_what_guesses_share_once() -> None:
    tokens, parents = merge([[5, 6, 7], [5, 8], [9], [5, 6, 4]], 7)
    assert tokens == (5, 6, 7, 8, 9, 4)
    assert parents == (-1, 0, 1, 0, -1, 1)
    assert walk(tokens, parents, [5, 6, 4, 1]) == [0, 1, 5]
    assert walk(tokens, parents, [9, 6]) == [4]
    assert walk(tokens, parents, [1]) == []
    assert ancestry(parents, 5) == [0, 1, 5]
    assert merge([[5, 6, 7], [5, 8], [9]], 4) == ((5, 6, 7, 8), (-1, 0, 1, 0))


def _plain(tokens: list[int], most: int, count: int) -> list[int]:
    for size in range(min(most, len(tokens) - 1), 0, -1):
        for first in range(len(tokens) - size - 1, -1, -1):
            if tokens[first : first + size] == tokens[-size:]:
                longer = list(tokens)
                for place in range(count):
                    longer.append(longer[first + size + place])
                return longer[len(tokens) :]
    return []


def test_speculation_that_never_pays_is_seen_to_be_off() -> None:
    """Drafts that are always wrong: the figures show it, and what is drafted is little."""
    engine = speculating(noise=3.0, adaptive=True)
    shown = []
    for prompt in PROMPTS[:6]:
        engine.submit(ask(prompt, 60))
    while engine.busy:
        engine.step()
        shown.append(engine.stats.drafted_sequences)
    assert engine.stats.accepted_draft_tokens < 0.1 * engine.stats.draft_tokens
    assert engine.stats.step_part["draft"] > 0
    assert shown.count(0) > len(shown) / 2
    plain = load(checkpoint("llama"))
    run(plain, [ask(PROMPTS[0], 60)])
    assert plain.stats.draft_tokens == plain.stats.drafted_sequences == 0
