"""Gated DeltaNet's rule by itself: what transformers computes, and the same bits however a sequence is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from inflight.engine.attention.torch_recurrence import StateRange, TorchRecurrence
from inflight.engine.kvcache.state_pool import StatePool
from inflight.engine.models.config import GatedDeltaNetConfig
from inflight.engine.models.gated_delta_net import DeltaInputs, DeltaRule, rows_by_kind
from inflight.engine.models.reading import read_model_config
from tests.engine.test_states import CONFIG

SHAPE = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_dim=16, value_dim=8, taps=4)
LENGTH = 300


def _inputs(count: int, seed: int, dtype: torch.dtype = torch.float32) -> DeltaInputs:
    chance = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, SHAPE.channels, generator=chance).to(dtype)
    beta = torch.rand(count, SHAPE.value_heads, generator=chance)
    return DeltaInputs(mixed, beta, -2 * torch.rand(count, SHAPE.value_heads, generator=chance).double() ** 4)


RULE = DeltaRule(SHAPE, torch.randn(SHAPE.channels, 1, 4, generator=torch.Generator().manual_seed(1)))


def _pool(slots: int = 1, dtype: torch.dtype = torch.float32) -> StatePool:
    config = read_model_config(CONFIG)
    layers = tuple(replace(layer, recurrent=layer.recurrent and SHAPE) for layer in config.layers)
    return StatePool(replace(config, layers=layers), slots, dtype, torch.device("cpu"))


def _run(pool: StatePool, inputs: DeltaInputs, ranges: list[StateRange]) -> Tensor:
    return TorchRecurrence(pool, ranges)(0, inputs, RULE)


def _in_parts(cuts: list[int], prompt: int, inputs: DeltaInputs, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the results of steps that end at ``cuts``, joined, and then the state behind them."""
    pool, parts, start = _pool(dtype=dtype), [], 0
    for end in cuts:
        parts.append(_run(pool, inputs.of(slice(start, end)), [StateRange(0, start, end - start, prompt, 0)]))
        start = end
    return [torch.cat(parts), *(part.clone() for part in pool.layers[0])]


@pytest.mark.parametrize("prompt", [LENGTH, 0, 100])
def test_it_is_what_transformers_computes_token_by_token(prompt: int) -> None:
    inputs = _inputs(LENGTH, 2)
    out, _, matrix = _in_parts([LENGTH], prompt, inputs)
    weight = torch.randn(SHAPE.channels, 1, 4, generator=torch.Generator().manual_seed(1))
    mixed = torch.nn.functional.conv1d(inputs.mixed.t()[None], weight, padding=3, groups=SHAPE.channels)[..., :LENGTH]
    heads = torch.nn.functional.silu(mixed)[0].t().split((32, 32, 32), dim=-1)
    query, key, value = (part.unflatten(-1, (-1, dim))[None] for part, dim in zip(heads, (16, 16, 8), strict=True))
    expected, state = torch_recurrent_gated_delta_rule(
        query, key, value, inputs.decay.float()[None], inputs.beta[None],
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(matrix, state, atol=1e-5, rtol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompt", [LENGTH, 256, 200, 64, 1])
def test_a_prompt_cut_at_multiples_of_64_has_the_same_bits(prompt: int, dtype: torch.dtype) -> None:
    """Behind the prompt it may be cut anywhere: there tokens go one by one, decoded or computed again."""
    inputs = _inputs(LENGTH, 3, dtype)
    whole = _in_parts([LENGTH], prompt, inputs, dtype)
    cuts = [*range(64, prompt, 64), prompt, *range(prompt + 1, LENGTH + 1)]
    some = [*range(128, prompt, 128), *range(max(prompt, 130), LENGTH, 37), LENGTH]
    for others in (cuts, some):
        for part, other in zip(_in_parts(others, prompt, inputs, dtype), whole, strict=True):
            assert torch.equal(part, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_change_no_bit(dtype: torch.dtype) -> None:
    """One step of prompts, decoded tokens, tokens that are computed again, and padding behind."""
    sizes = [1, 70, 1, 5, 64, 1, 33, 1, 1]
    starts = [20, 64, 130, 10, 0, 7, 128, 3, 99]
    prompts = [20, 134, 90, 8, 64, 7, 161, 2, 99]
    inputs, first = _inputs(sum(sizes) + 3, 4, dtype), 0
    pool = _pool(len(sizes), dtype)
    for part in pool.parts:
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(5)))
    kept = [part.clone() for part in pool.parts]
    ranges = []
    for slot, (size, start, prompt) in enumerate(zip(sizes, starts, prompts, strict=True)):
        ranges.append(StateRange(first, start, size, prompt, slot))
        first += size
    together = _run(pool, inputs, ranges)
    assert not together[first:].any(), "padding has results"
    after = [part.clone() for part in pool.parts]
    for one in ranges:
        for part, old in zip(pool.parts, kept, strict=True):
            part.copy_(old)
        rows = slice(one.first, one.first + one.count)
        alone = _run(pool, inputs.of(rows), [replace(one, first=0)])
        assert torch.equal(alone, together[rows])
        for part, new in zip(pool.parts, after, strict=True):
            assert torch.equal(part[0, one.slot], new[0, one.slot])


def test_rows_by_heads_of_keys_are_found() -> None:
    """As the checkpoint has them: of each head of keys its query, key, values and gates; its betas and steps."""
    small = GatedDeltaNetConfig(key_heads=2, value_heads=4, key_dim=1, value_dim=2, taps=4, interleaved=True)
    qkvz, ba = rows_by_kind(small)
    assert qkvz.tolist() == [0, 10, 1, 11, *range(2, 6), *range(12, 16), *range(6, 10), *range(16, 20)]
    assert ba.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
