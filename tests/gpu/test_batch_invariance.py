"""``engine.batch_invariant`` on a GPU: the same bits in any batch, at the sizes of real models."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.checkpoints import Experts, Shape
from inflight.engine.cuda.invariant import FEW_ROWS, MANY_ROWS, InvariantLinear, product
from inflight.engine.cuda.prepare import INVARIANT_ON
from tests.engine.support.driving import ask, run
from tests.gpu.support.device import DEVICE, SHAPE, engine

EXPERTS = Shape("experts", 1e7, 4096, 512, 1024, 2, 8, 2, Experts(16, 4, 256))

ROWS = (1, 2, 3, 4, 8, 16, 17, 63, 64, 65, 100, 128, 129, 256, 1000, 4096)


@pytest.fixture(autouse=True)
def _holds_here() -> None:
    if torch.cuda.get_device_capability() != INVARIANT_ON:
        pytest.skip("engine.batch_invariant is refused here")


@pytest.mark.parametrize(("columns", "depth"), [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (999, 520)])
def test_a_row_of_a_product_is_the_same_among_any_number_of_rows(columns: int, depth: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(columns, depth, device=DEVICE, dtype=torch.bfloat16)
    x = torch.randn(max(ROWS), depth, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.randn(columns, device=DEVICE, dtype=torch.bfloat16)
    whole = product(x, weight, bias)
    for count in ROWS:
        assert torch.equal(product(x[-count:], weight, bias), whole[-count:]), f"{count} rows"
    assert torch.equal(product(x, weight, bias, FEW_ROWS), product(x, weight, bias, MANY_ROWS))
    exact = x.double() @ weight.double().t() + bias.double()
    assert float((whole.double() - exact).norm() / exact.norm()) < 3e-3


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=lambda shape: shape.name)
def test_a_request_gets_the_same_bits_alone_and_among_others(shape: Shape) -> None:
    one = engine(shape, batch_invariant=True, max_batch_size=64, max_tokens_per_step=96, num_blocks=2048)
    assert isinstance(one._runner._model.lm_head, InvariantLinear)
    prompts = [tuple((7 * row + 3 * at) % 4000 for at in range(5 + 11 * row)) for row in range(40)]
    settings = {"max_tokens": 12, "log_probs": True, "temperature": 0.8}
    alone = {}
    for row in (0, 7, 23, 39):
        request = ask(prompts[row], seed=row, **settings)
        alone[row] = run(one, [request])[request.key]
    requests = [ask(prompt, seed=row, **settings) for row, prompt in enumerate(prompts)]
    outputs = run(one, requests)
    for row, expected in alone.items():
        seen = outputs[requests[row].key]
        assert (seen.tokens, seen.log_probs) == (expected.tokens, expected.log_probs)
