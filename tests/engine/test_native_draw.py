"""Drawing natively gives the tokens of the draw that sorts, or says why there is none."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inflight.engine.native.bindings import NativeError
from inflight.engine.native.model import NativeModel
from inflight.engine.sampler import Draw, draw_sorted, draw_tokens
from inflight.engine.sequence import ALL_BANNED, NAN_LOGITS
from tests.engine.support.draws import KINDS, make_case
from tests.engine.support.native import SETS, each_set, random_decoder
from tests.support.pairs import pairwise

GREEDY = Draw(0.0, 0, 1.0, 0.0, 0.0)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "shape", "instruction_set"), pairwise(list(KINDS), [(20_000, 40), (500, 5_003)], SETS)
)
def test_the_tokens_are_those_of_the_sort(
    kind: Callable[[Tensor, torch.Generator], Tensor], shape: tuple[int, int], instruction_set: str
) -> None:
    rows, size = shape
    native = NativeModel(random_decoder("llama", vocab_size=size), instruction_set, 2)
    case = make_case(rows, size, kind, torch.Generator().manual_seed(size))
    temperature, top_k, top_p, min_p, number = (part[:, 0].tolist() for part in case[1:])
    draws = [Draw(*one) for one in zip(temperature, map(int, top_k), top_p, min_p, number, strict=True)]
    expected = draw_sorted(*case)
    assert torch.equal(native.draw(case[0], draws), expected)
    greedy = [one if row % 2 else GREEDY for row, one in enumerate(draws)]
    assert torch.equal(native.draw(case[0], greedy), draw_tokens(case[0], greedy))


def test_rows_of_which_most_is_banned_cost_no_more_than_free_ones() -> None:
    rows, size = 4, 128_256
    native = NativeModel(random_decoder("llama", vocab_size=size), SETS[0], 1)
    free = torch.randn(rows, size, generator=torch.Generator().manual_seed(1))
    banned = torch.full_like(free, -math.inf)
    banned[:, 77] = 0.0
    draws, seconds = [Draw(1.0, 50, 1.0, 0.0, 0.4)] * rows, {"free": math.inf, "banned": math.inf}
    for _ in range(15):
        for name, logits in (("free", free), ("banned", banned)):
            began = time.perf_counter()
            native.draw(logits, draws)
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    assert seconds["banned"] < 2 * seconds["free"]


@each_set
def test_a_row_without_a_token_says_why(instruction_set: str) -> None:
    native = NativeModel(random_decoder("llama", vocab_size=37), instruction_set, 2)
    logits = torch.randn(6, 37)
    logits[0, 36], logits[1], logits[2, :36], logits[3, 5] = math.nan, -math.inf, -math.inf, math.inf
    draws = [Draw(0.7, 0, 0.9, 0.0, 0.99)] * 5 + [GREEDY]
    expected = [NAN_LOGITS, ALL_BANNED, 36, 5]
    assert native.draw(logits, draws)[:4].tolist() == expected
    assert native.draw(logits, [GREEDY] * 6)[:4].tolist() == expected
    assert native.draw(logits, draws)[4:].tolist() == draw_tokens(logits, draws)[4:].tolist()
    assert not len(native.draw(logits[:0], []))


@each_set
@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e6, 1e300])
def test_any_temperature_is_drawn_with(temperature: float, instruction_set: str) -> None:
    native = NativeModel(random_decoder("llama", vocab_size=50), instruction_set, 1)
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    draws = [Draw(temperature, 0, 1.0, 0.0, row / 40) for row in range(40)]
    assert torch.equal(native.draw(logits, draws), draw_tokens(logits, draws))


@each_set
@pytest.mark.parametrize(
    "draw",
    [
        Draw(-1.0, 0, 1.0, 0.0, 0.5), Draw(math.nan, 0, 1.0, 0.0, 0.5), Draw(1.0, -1, 1.0, 0.0, 0.5),
        Draw(1.0, 0, 0.0, 0.0, 0.5), Draw(1.0, 0, 1.1, 0.0, 0.5), Draw(1.0, 0, 1.0, 1.1, 0.5),
        Draw(1.0, 0, 1.0, 0.0, 1.0),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_by_is_refused(draw: Draw, instruction_set: str) -> None:
    native = NativeModel(random_decoder("llama", vocab_size=37), instruction_set, 1)
    with pytest.raises(NativeError, match="row 1 is drawn with temperature"):
        native.draw(torch.zeros(2, 37), [GREEDY, draw])
