"""The Triton kernels, run by Triton's interpreter, against plain PyTorch.

Tolerances are of sums in another order: two millionths of values of order one in float32, and the last bits of the type
in float16, where weights are rounded before they are summed. The interpreter cannot multiply bfloat16: tests/gpu does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.engine.paged_steps import CPU, MIXED, activations, both, filled, kernels_see, shape, spans_of

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # numpy's; a GPU says nothing


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"),
    [(4, 4, 16, 16, None), (4, 2, 64, 24, 8), (7, 1, 24, 16, 8), (6, 2, 80, 64, 40), (2, 1, 256, 16, None)],
)
def test_equal_to_the_reference(heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None) -> None:
    seen, expected = both(shape(heads, kv_heads, head_dim), MIXED, block_size=block_size, window=window)
    torch.testing.assert_close(seen, expected, rtol=2e-6, atol=2e-6)


def test_blocks_of_one_token() -> None:
    seen, expected = both(shape(4, 2, 32), [(9, 1), (3, 8), (0, 15)], block_size=1)
    torch.testing.assert_close(seen, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["", "fp8", "int8"])
def test_float16(kind: str) -> None:
    seen, expected = both(shape(4, 2, 32), MIXED, dtype=torch.float16, kind=kind)
    torch.testing.assert_close(seen, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_quantized_cache_in_float32(kind: str) -> None:
    seen, expected = both(shape(4, 2, 32), MIXED, kind=kind, window=50)
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def rows_are_multiplied_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter multiply tiles as a GPU does: a row's result does not depend on its place in the tile.

    It multiplies with numpy, whose OpenBLAS adds up some rows of a matrix in another order than the rest, on AVX2 and
    on AMD's processors. The kernels choose the tiles and their order, and these are what the test is about.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_dot(_: object, a: Any, b: Any, total: Any, *__: object) -> Any:
        result = total.data.copy()
        for column, row in zip(a.data.T, b.data, strict=True):
            result += np.multiply.outer(column, row, dtype=result.dtype)
        return interpreter.TensorHandle(result, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("rows_are_multiplied_alike")
@pytest.mark.parametrize("window", [None, 20])
def test_a_token_sees_the_same_whatever_its_chunk_and_its_neighbours(window: int | None) -> None:
    config, dtype = shape(6, 2, 32), torch.float16
    whole = spans_of([(70, 50), (200, 1), (3, 1)], 16)
    query, key, value = activations(config, whole, dtype, CPU)

    def step(tensors: object, spans: list, rows: slice) -> torch.Tensor:
        parts = (query[rows], key[rows], value[rows])
        return kernels_see(tensors, spans, 16, 0, *parts, window, config.attention_scale)

    together = step(filled(config, whole, 16, dtype, "", CPU), whole, slice(None))
    alone, first = filled(config, whole, 16, dtype, "", CPU), whole[0]
    parts = []
    for start, count in ((70, 7), (77, 33), (110, 10)):
        spans = [type(first)(0, start, count, first.blocks)]
        parts.append(step(alone, spans, slice(start - 70, start - 70 + count)))
    for span in whole[1:]:
        spans = [type(span)(0, span.start, 1, span.blocks)]
        parts.append(step(alone, spans, slice(span.first, span.first + 1)))
    assert torch.equal(torch.cat(parts), together)
