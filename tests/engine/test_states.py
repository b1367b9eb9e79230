"""The slots of recurrent states: whose they are, what is in them, and that none is lost."""

from __future__ import annotations

import random

import pytest
import torch

from inflight.engine.kvcache.blocks import BlockTable, StateCopy
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.kvcache.state_pool import StatePool
from inflight.engine.kvcache.states import StateSlots
from inflight.engine.models.reading import read_model_config

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}
SEQUENCES = 4


class Serving:
    """A cache, and of every slot the tokens that its state is of, as steps would leave them."""

    def __init__(self, snapshots: int, num_blocks: int = 64, block_size: int = 16) -> None:
        self.states = StateSlots(SEQUENCES, snapshots, block_size, 128)
        self.cache = KvCacheManager(num_blocks, block_size, states=self.states)
        self.content: list[tuple[int, ...] | None] = [None] * self.states.num_slots
        self.running: list[tuple[list[int], int, BlockTable]] = []
        """Tokens, how many of them are the prompt, and the table."""

    def admit(self, tokens: list[int], prompt: int, reuse: bool = True) -> BlockTable | None:
        match = self.cache.match(tokens, reuse, prompt)
        if len(self.running) == SEQUENCES or not self.cache.has_room(match, len(tokens)):
            return None
        table = self.cache.admit(match, len(tokens))
        self.running.append((tokens, prompt, table))
        return table

    def step(self, index: int, most: int) -> None:
        """Compute up to ``most`` of a sequence's next tokens."""
        tokens, prompt, table = self.running[index]
        start = table.num_computed
        size = self.cache.chunk_size(table, start, min(most, len(tokens) - start))
        assert table.state is not None
        assert self.cache.grow(table, start + size)
        self.copy()
        assert self.content[table.state.slot] == tuple(tokens[:start]), "the state is of other tokens"
        if not size:
            assert min(most, len(tokens) - start) < 64
            return
        end = start + size
        assert end % 64 == 0 or end >= prompt
        self.content[table.state.slot] = tuple(tokens[:end])
        self.cache.commit(table, tokens, end)

    def copy(self) -> None:
        for source, target in self.cache.take_state_copies():
            self.content[target] = () if source is None else self.content[source]

    def end(self, index: int) -> None:
        self.cache.free(self.running.pop(index)[2])


@pytest.mark.sweep
@pytest.mark.parametrize("snapshots", [0, 1, 5])
def test_no_slot_is_lost_and_none_has_anothers_state(snapshots: int) -> None:
    chance = random.Random(snapshots)
    serving = Serving(snapshots)
    beginnings = [[chance.randrange(3) for _ in range(400)] for _ in range(4)]
    hits = admitted = 0
    for _ in range(10_000):
        action = chance.random()
        if action < 0.3:
            shared = chance.choice(beginnings)[: chance.randrange(1, 400)]
            prompt = [*shared, *(chance.randrange(3) for _ in range(chance.randrange(1, 80)))]
            more = [chance.randrange(3) for _ in range(chance.choice([0, 0, 70]))]  # of a preempted sequence
            table = serving.admit([*prompt, *more], len(prompt), reuse=chance.random() < 0.9)
            admitted += table is not None
            hits += table is not None and table.num_computed > 0
        elif serving.running and action < 0.9:
            serving.step(chance.randrange(len(serving.running)), chance.choice([1, 63, 64, 65, 100, 500]))
        elif serving.running:
            serving.end(chance.randrange(len(serving.running)))
        serving.cache.check()
        assert serving.states.num_running == len(serving.running)
    while serving.running:
        serving.end(0)
    serving.cache.check()
    assert serving.states.num_running == 0
    assert admitted > 500
    assert (hits > 50) == (snapshots > 0)


def test_a_slot_is_cleared_before_another_sequence_has_it() -> None:
    serving = Serving(0)
    first = serving.admit([1] * 70, 70)
    assert first is not None
    assert first.state is not None
    serving.step(0, 100)
    slot = first.state.slot
    serving.end(0)
    second = serving.admit([2] * 70, 70)
    assert second is not None
    assert second.state is not None
    assert second.state.slot == slot, "the last slot that became free is taken first"
    assert serving.cache.take_state_copies() == [StateCopy(None, slot)]


def test_copies_of_the_pool_are_of_all_layers_and_in_their_order() -> None:
    config = read_model_config(CONFIG)
    pool = StatePool(config, 3, torch.float32, torch.device("cpu"))
    assert pool.layers.keys() == {0, 1, 2}
    assert pool.nbytes == 3 * 3 * 4 * (2 * 3 * 5 + (2 * 3 + 2 * 5) * 3)
    for part in pool.parts:
        part.copy_(torch.randn(part.shape))
    before = [part.clone() for part in pool.parts]
    pool.copy([StateCopy(0, 1), StateCopy(None, 0), StateCopy(1, 2)])
    for part, old in zip(pool.parts, before, strict=True):
        assert not part[:, 0].any()
        assert torch.equal(part[:, 1], old[:, 0])
        assert torch.equal(part[:, 2], old[:, 0])


def _computed(serving: Serving, tokens: list[int], prompt: int | None = None) -> int:
    """Serve a sequence from its beginning to its end; return how many of its tokens were cached."""
    table = serving.admit(tokens, len(tokens) if prompt is None else prompt)
    assert table is not None
    cached = table.num_computed
    while table.num_computed < len(tokens):
        serving.step(len(serving.running) - 1, 1000)
    serving.end(len(serving.running) - 1)
    return cached


def test_a_prompt_is_found_again_up_to_its_last_whole_chunk() -> None:
    serving = Serving(8)
    prompt = list(range(300))
    assert [_computed(serving, prompt) for _ in range(2)] == [0, 256]
    assert _computed(serving, [*prompt, *range(1000, 1100)]) == 256  # a conversation that goes on
    assert _computed(serving, [*prompt, *range(1000, 1100)]) == 384


def test_of_a_prompt_of_whole_chunks_the_last_one_is_computed() -> None:
    serving = Serving(8)
    assert [_computed(serving, [7] * 128) for _ in range(2)] == [0, 64]


def test_where_prompts_depart_a_snapshot_is_left_for_the_third() -> None:
    serving = Serving(8)
    shared = list(range(250))
    prompts = [[*shared, *range(1000 * own, 1000 * own + 200)] for own in range(1, 4)]
    assert [_computed(serving, prompt) for prompt in prompts] == [0, 128, 192]


def test_a_long_prompt_leaves_snapshots_at_intervals() -> None:
    serving = Serving(8)
    _computed(serving, list(range(500)))
    assert serving.states.num_snapshots == 4  # 128, 256, 384, 448


def test_what_was_generated_is_not_reused_before_it_is_part_of_a_prompt() -> None:
    serving = Serving(8)
    tokens = list(range(400))
    assert _computed(serving, tokens, prompt=100) == 0
    assert _computed(serving, tokens) == 64
    assert _computed(serving, tokens, prompt=100) == 64, "a preempted sequence computes its own tokens by its own rule"
    assert _computed(serving, tokens) == 384


def test_the_least_recently_used_snapshot_goes_first() -> None:
    serving = Serving(2)
    prompts = [[own] * 100 for own in range(3)]
    assert [_computed(serving, prompt) for prompt in prompts[:2]] == [0, 0]
    assert _computed(serving, prompts[0]) == 64
    _computed(serving, prompts[2])  # in place of the second one's
    assert [_computed(serving, prompt) for prompt in prompts] == [64, 0, 0]


def test_a_snapshot_goes_with_its_block() -> None:
    serving = Serving(8, num_blocks=16)
    _computed(serving, [1] * 100)
    assert serving.states.num_snapshots == 1
    _computed(serving, [2] * 256)  # takes all blocks
    assert _computed(serving, [1] * 100) == 0
    serving.cache.check()


def test_snapshots_of_a_failed_step_are_forgotten() -> None:
    serving = Serving(8)
    _computed(serving, [1] * 100)
    serving.cache.take_state_copies()  # lost with the step that was to make them
    serving.cache.forget_copied()
    assert serving.states.num_snapshots == 0
    assert _computed(serving, [1] * 100) == 0


def test_snapshots_lie_at_whole_blocks_and_whole_chunks() -> None:
    serving = Serving(8, block_size=48)
    _computed(serving, list(range(500)))
    assert _computed(serving, list(range(500))) == 384  # twice the least common multiple of 48 and 64
