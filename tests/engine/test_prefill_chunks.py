"""``prefill_chunk_tokens``: beside sequences that decode, prompts are computed in small pieces; alone, in large."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.support.books import POLICIES, Books, Policy, sizes
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import ask, load, run


def test_a_long_prompt_is_held_to_its_limit_beside_who_decodes() -> None:
    books = Books(max_tokens_per_step=12, prefill_chunk_tokens=3, blocks=32)
    decodes = books.add(4, max_tokens=6)
    assert sizes(books.step()) == {decodes: 4}
    long = books.add(40)
    assert [sizes(books.step()) for _ in range(5)] == [{decodes: 1, long: 3}] * 5
    assert books.ended == [decodes]
    assert sizes(books.step()) == {long: 12}, "nobody decodes: the whole budget"


@given(
    policy=st.sampled_from(POLICIES),
    budget=st.integers(1, 20),
    chunk=st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
def test_no_step_in_which_others_decode_prefills_more(policy: Policy, budget: int, chunk: int, seed: int) -> None:
    chance, limit = random.Random(seed), min(chunk, budget)
    books = Books(policy, 12, max_tokens_per_step=budget, prefill_chunk_tokens=limit, max_batch_size=6)
    for step in range(120):
        if step < 60 and chance.random() < 0.5:
            books.add(chance.randint(1, 30), chance.randint(1, 10))
        decoding = {one for one in books.scheduler.running if one.remaining == 1}
        chunks = sizes(books.step())
        prefill = sum(size for sequence, size in chunks.items() if sequence not in decoding)
        if decoding & chunks.keys():
            assert prefill <= limit


@pytest.mark.parametrize("chunk", [1, 5])
def test_tokens_do_not_depend_on_the_size_of_chunks(chunk: int) -> None:
    engine = load(checkpoint("llama"), max_tokens_per_step=16, prefill_chunk_tokens=chunk)
    requests = [ask([7, place, 3] * (2 + 3 * place), 6) for place in range(5)]
    outputs = run(engine, requests)
    for request in requests:
        assert outputs[request.key].tokens == greedy("llama", tuple(request.prompt), 6)
