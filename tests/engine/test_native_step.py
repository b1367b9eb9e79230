"""The native step: what PyTorch computes, with the same bits whatever else is in the batch, and nothing but its own."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.kvcache.memory_pool import Fp8KvPool, KvPool
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.experts import MoeBlock
from inflight.engine.native.bindings import NativeError
from inflight.engine.native.model import NativeModel
from inflight.resources import DEMO
from inflight.text.tokenizer import Tokenizer
from tests.engine.support.driving import ask, load, run
from tests.engine.support.native import (
    ROUTED,
    SETS,
    SHAPES,
    VOCAB,
    by_pytorch,
    each_set,
    make_pool,
    random_decoder,
)
from tests.support.pairs import pairwise

TREE = [[0], [0, 1], [0, 2], [0, 2, 3], [4]]
TOLERANCE = {"float32": 3e-4, "bfloat16": 0.05, "int8": 0.05, "fp8": 0.3}
"""Of logits of about one: a sum of another order rounds some keys and values to their neighbours, and products of
bfloat16 round what they multiply."""
SENSITIVE = "wide heads"
"""The shape whose logits change most where keys and values are stored or read wrongly: it is tried with every type of
cache by every instruction set."""
THREADS = 2
SAMPLE_TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:2000]


def _tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def _native(
    model: DecoderModel, pool: KvPool, block_size: int, instruction_set: str, weights: str = "checkpoint"
) -> NativeModel:
    native = NativeModel(model, instruction_set, THREADS, weights)
    native.use(pool, block_size)
    return native


def _kinds(name: str) -> Collection[str]:
    """Return the types of caches whose rounding cannot change what is chosen in a model."""
    return ("float32",) if name in ROUTED else TOLERANCE


class _Twins:
    """The same model twice, each with a cache of its own: natively, and by PyTorch."""

    def __init__(
        self, name: str, kind: str, block_size: int, instruction_set: str, weights: str = "checkpoint"
    ) -> None:
        self.model, given = random_decoder(name), random_decoder(name)
        self.block_size, blocks = block_size, 1200 // block_size
        self.pools = [make_pool(self.model, kind, blocks, block_size) for _ in range(2)]
        self.native = _native(given, self.pools[1], block_size, instruction_set, weights)
        order = random.Random(1).sample(range(blocks), blocks)
        needed = -(-700 // block_size)
        self.blocks = [order[:needed], order[needed : needed + -(-200 // block_size)], order[-(-100 // block_size) :]]

    def differ(self, *chunks: tuple[int, list[int], int, list[list[int]]]) -> float:
        """Compute chunks (sequence, tokens, start, tree) both ways; return the largest difference of logits.

        Logits that spread over more than one count as so many times smaller: a tied head makes them large.
        """
        ranges, tokens = [], list[int]()
        for sequence, own, start, tree in chunks:
            ranges.append(QueryRange(len(tokens), start, len(own), self.blocks[sequence], tree))
            tokens += own
        expected = by_pytorch(self.model, self.pools[0], self.block_size, tokens, ranges)
        made = self.native(np.array(tokens), ranges, range(len(tokens)))
        return float((made - expected).abs().max() / expected.std().clamp(min=1.0))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "instruction_set", "kind", "block_size"),
    [
        *pairwise(
            [name for name in SHAPES if name not in ("many heads", SENSITIVE)], SETS, list(TOLERANCE), [16, 5],
            allowed=lambda name, _set, kind, _size: kind in _kinds(name),
        ),
        *((SENSITIVE, one, kind, size) for one in SETS for kind, size in zip(TOLERANCE, [16, 5, 16, 5], strict=True)),
    ],
)  # fmt: skip
def test_it_computes_what_pytorch_computes(name: str, kind: str, block_size: int, instruction_set: str) -> None:
    """Prompts, chunks, single tokens and trees of drafts, together in a step."""
    twins = _Twins(name, kind, block_size, instruction_set)
    one, other, third = _tokens(620, 1), _tokens(90, 2), _tokens(60, 3)
    worst = twins.differ((0, one[:600], 0, []), (1, other[:30], 0, []))
    worst = max(worst, twins.differ((0, one[600:601], 600, []), (1, other[30:85], 30, []), (2, third[:7], 0, [])))
    worst = max(worst, twins.differ((0, one[601:606], 601, TREE), (1, other[85:86], 85, []), (2, third[7:8], 7, [])))
    assert worst < TOLERANCE[kind]


@each_set
@pytest.mark.parametrize(("kind", "scale"), [*((kind, 0.01) for kind in TOLERANCE), ("fp8", 100.0)])
def test_what_it_stores_is_what_pytorch_stores(kind: str, scale: float, instruction_set: str) -> None:
    """The scale is that of FP8; by the large one most numbers are denormal."""
    twins = _Twins("llama", kind, 16, instruction_set)
    for pool in twins.pools:
        if isinstance(pool, Fp8KvPool):
            pool.layer_scales.keys.fill_(scale)
            pool.layer_scales.values.fill_(scale)
    twins.native.use(twins.pools[1], 16)
    twins.differ((0, _tokens(60, 1), 0, []))
    slots = (torch.tensor(twins.blocks[0][:3])[:, None] * 16 + torch.arange(16)).flatten()
    for expected, stored in zip(*(pool.read(0, slots) for pool in twins.pools), strict=True):
        assert stored.any()
        assert stored.isclose(expected, rtol=1e-3, atol=1e-5).double().mean() > 0.99


def _round_by_groups(x: Tensor, group: int, most: int, scales: torch.dtype = torch.float32) -> Tensor:
    """Round each group of the last dimension to multiples of a part of its largest value."""
    groups = functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    unit = (groups.abs().amax(-1, keepdim=True) / most).to(scales).float()
    rounded = torch.where(unit > 0, groups / unit, 0.0).round().clamp(-most, most) * unit
    return rounded.flatten(-2)[..., : x.shape[-1]]


@each_set
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("many heads", *ROUTED)])
def test_weights_in_int8_are_those_of_rounded_linears(name: str, instruction_set: str) -> None:
    """By groups of 64 with inputs of 16 bits where words are multiplied; of 32 with 8 bits where bytes are."""
    multiplies_bytes = instruction_set in ("avx512_vnni", "avx512_bf16", "amx")
    group, most, tolerance = (32, 127, 0.1) if multiplies_bytes else (64, 32767, 3e-3)
    twins = _Twins(name, "float32", 16, instruction_set, "int8")
    for linear in [module for module in twins.model.modules() if isinstance(module, nn.Linear)]:
        linear.weight = nn.Parameter(_round_by_groups(linear.weight, group, 127, torch.bfloat16), requires_grad=False)
        linear.register_forward_pre_hook(lambda _, inputs: _round_by_groups(inputs[0], group, most))
    one, other = _tokens(300, 1), _tokens(90, 2)
    worst = twins.differ((0, one[:200], 0, []), (1, other[:30], 0, []))
    worst = max(worst, twins.differ((0, one[200:201], 200, []), (1, other[30:32], 30, [])))
    worst = max(worst, twins.differ((0, one[201:202], 201, [])))
    assert worst < tolerance


def _in_parts(
    name: str,
    dtype: torch.dtype,
    kind: str,
    instruction_set: str,
    sizes: list[int],
    neighbour: bool,
    weights: str = "checkpoint",
) -> Tensor:
    """Return the logits of 640 tokens, computed in parts of these sizes, the last one repeated."""
    model = random_decoder(name, dtype)
    native = _native(model, make_pool(model, kind, 120, 16), 16, instruction_set, weights)
    tokens, other = np.array(_tokens(640, 4)), np.array(_tokens(700, 5))
    sizes, chance, at, beside, parts = list(sizes), random.Random(6), 0, 0, []
    while at < len(tokens):
        size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], len(tokens) - at)
        count = min(chance.randint(1, 20), len(other) - beside) if neighbour else 0
        ranges = [QueryRange(0, beside, count, range(60, 110))] if count else []
        ranges.append(QueryRange(count, at, size, range(50)))
        step = np.concatenate((other[beside : beside + count], tokens[at : at + size]))
        parts.append(native(step, ranges, range(count, count + size)))
        at, beside = at + size, beside + count
    return torch.cat(parts)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "instruction_set", "kind", "dtype"),
    pairwise(
        ["llama", "odd sizes", "odd chunks", "window", "gemma", *ROUTED, "norms behind"], SETS, list(TOLERANCE),
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)  # fmt: skip
def test_a_token_is_the_same_bits_in_any_step(name: str, dtype: torch.dtype, kind: str, instruction_set: str) -> None:
    """A prompt at once and in chunks, tokens one by one, and beside a neighbour."""
    whole = _in_parts(name, dtype, kind, instruction_set, [640], False)
    assert whole.isfinite().all()
    for sizes, neighbour in (([37], False), ([113, 113, 113, 1], False), ([300, 300, 1], True)):
        assert torch.equal(_in_parts(name, dtype, kind, instruction_set, sizes, neighbour), whole), sizes


@each_set
@pytest.mark.parametrize("name", ["llama", "odd sizes", "gemma", "shared expert"])
def test_a_token_is_the_same_bits_in_any_step_with_weights_in_int8(name: str, instruction_set: str) -> None:
    how = torch.bfloat16, "int8", instruction_set
    whole = _in_parts(name, *how, [640], False, "int8")
    assert whole.isfinite().all()
    for sizes, neighbour in (([37], False), ([113, 113, 113, 1], False), ([300, 2, 3, 4, 5, 300, 1], True)):
        assert torch.equal(_in_parts(name, *how, sizes, neighbour, "int8"), whole), sizes


@each_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_expert_may_have_all_tokens_or_none(dtype: torch.dtype, instruction_set: str) -> None:
    """The same bits as alone, and what PyTorch computes."""
    model = random_decoder("sinks", dtype)
    for layer in model.model.layers:
        assert isinstance(layer.mlp, MoeBlock)
        layer.mlp.gate.bias[:3] = torch.tensor([100.0, -100.0, -100.0])
    native = _native(copy.deepcopy(model), make_pool(model, "float32", 20, 16), 16, instruction_set)
    tokens, ranges = _tokens(90, 8), [QueryRange(0, 0, 90, range(10))]
    whole = native(np.array(tokens), ranges, range(90))
    expected = by_pytorch(model.float(), make_pool(model, "float32", 20, 16), 16, tokens, ranges)
    if dtype is torch.float32:
        assert (whole - expected).abs().max() < TOLERANCE["float32"]
    alone = [native(np.array([one]), [QueryRange(0, at, 1, range(10))], [0]) for at, one in enumerate(tokens)]
    assert torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize(
    ("name", "instruction_set", "kind", "weights"),
    pairwise(
        ["llama", "odd sizes", "odd chunks", "shared expert"], SETS, list(TOLERANCE), ["float32", "bfloat16", "int8"]
    ),
)
def test_nan_reaches_only_those_who_attend_to_it(name: str, weights: str, kind: str, instruction_set: str) -> None:
    """Not the tokens before it in its sequence, though they are computed with it, no other sequence, no later step."""
    model = random_decoder(name, torch.bfloat16 if weights == "bfloat16" else torch.float32)
    rounded = "int8" if weights == "int8" else "checkpoint"
    native = _native(model, make_pool(model, kind, 40, 16), 16, instruction_set, rounded)
    ranges = [QueryRange(0, 0, 20, range(2)), QueryRange(20, 0, 20, range(2, 4)), QueryRange(40, 0, 20, range(4, 6))]
    tokens = np.array(_tokens(60, 7)) % (VOCAB - 1)
    clean = native(tokens, ranges, range(60))
    model.model.embed_tokens.weight[VOCAB - 1] = torch.nan
    clean_tokens, tokens[30] = tokens.copy(), VOCAB - 1
    spoilt = native(tokens, ranges, range(60))
    assert torch.equal(spoilt[:30], clean[:30])
    assert spoilt[30:40].isnan().all()
    assert torch.equal(spoilt[40:], clean[40:])
    assert torch.equal(native(clean_tokens, ranges, range(60)), clean)


@each_set
def test_weights_in_int8_cost_little(instruction_set: str) -> None:
    """The KL divergence of the demo model, to the same with its own weights, over a page of text."""
    outputs = {}
    for weights in ("checkpoint", "int8"):
        engine = load(DEMO / "model", cpu_step=instruction_set, weights=weights)
        request = ask(Tokenizer.from_checkpoint(DEMO / "model").encode_batch([SAMPLE_TEXT])[0], 1, context_logits=True)
        logits = run(engine, [request])[request.key].context_logits
        outputs[weights] = torch.as_tensor(logits).log_softmax(-1)
    own, rounded = outputs["checkpoint"], outputs["int8"]
    divergence = float((own.exp() * (own - rounded)).sum(-1).mean())
    assert 0.0 < divergence < 2e-3


@each_set
def test_what_does_not_exist_is_refused(instruction_set: str) -> None:
    """A token, a block, a row, or room in a table: before anything is written."""
    model = random_decoder("llama")
    pool = make_pool(model, "float32", 10, 16)
    native = NativeModel(model, instruction_set, THREADS)
    step = np.array([1, 2, 3]), [QueryRange(0, 0, 3, [0])], [2]
    with pytest.raises(NativeError, match="no cache"):
        native(*step)
    native.use(pool, 16)
    tokens, ranges, rows = step
    for change, words in (
        ((np.array([1, VOCAB, 3]), ranges, rows), f"token 1 is {VOCAB}; the vocabulary has {VOCAB}"),
        ((np.array([1, -1, 3]), ranges, rows), "token 1 is -1"),
        ((tokens, [QueryRange(0, 0, 3, [10])], rows), "range 0 has block 10; there are 10"),
        ((tokens, [QueryRange(0, 0, 3, [-1])], rows), "range 0 has block -1"),
        ((tokens, [QueryRange(0, 14, 3, [0])], rows), "up to position 17, .* room for 16"),
        ((tokens, [QueryRange(0, 0, 3, [])], rows), "room for 0"),
        ((tokens, [QueryRange(0, -1, 3, [0])], rows), "from position -1"),
        ((tokens, [QueryRange(0, 0, 2, [0])], rows), "the ranges have 2 tokens; the step has 3"),
        ((tokens, ranges, [3]), "row 0 is token 3"),
        ((tokens, ranges, [-1]), "row 0 is token -1"),
        ((tokens, [QueryRange(0, 0, 3, [0], [[0], [99]])], rows), "range 2 has a key at 100"),
        ((np.array([], np.int64), [], []), "0 tokens"),
    ):
        with pytest.raises(NativeError, match=words):
            native(*change)
    assert not pool.parts[0].any()
    assert native(*step).isfinite().all()


@each_set
@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("experts", {"per_token": 9}, "layer 0 chooses 9 of 8 experts, in 1 of 1 groups"),
        ("groups of experts", {"groups": 3, "groups_per_token": 2}, "layer 0 chooses 3 of 8 experts, in 2 of 3 groups"),
        ("experts", {"shared_gate": True}, "layer 0 has a gate of no feed-forward"),
        ("experts", {"clamp": -1.0}, "layer 0 clamps what experts compute to -1"),
    ],
)
def test_experts_that_cannot_be_are_refused(
    name: str, changes: dict[str, Any], words: str, instruction_set: str
) -> None:
    model = random_decoder(name)
    experts = next(layer.experts for layer in model.config.layers if layer.experts)
    layers = [replace(layer, experts=replace(experts, **changes)) for layer in model.config.layers]
    if name == "experts":
        layers = [replace(layer, intermediate_size=0) for layer in layers]
    model.config = replace(model.config, layers=tuple(layers))
    with pytest.raises(NativeError, match=words):
        NativeModel(model, instruction_set, THREADS)
