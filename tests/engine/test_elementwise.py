"""The kernels between matrix products, by Triton's interpreter, against the layers that they take the place of."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from inflight.engine.cuda.elementwise import FusedRmsNorm, gate, rotate
from inflight.engine.models import rope
from inflight.engine.models.layers import GemmaRmsNorm, RmsNorm, gated

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's; a GPU says nothing

DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])


@DTYPES
@pytest.mark.parametrize("kind", [RmsNorm, GemmaRmsNorm])
@pytest.mark.parametrize("heads", [None, 3])
def test_norms(kind: type[RmsNorm], heads: int | None, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    norm = kind(24, 1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(5, 24, dtype=dtype) if heads is None else torch.randn(5, 7, 24, dtype=dtype)[:, 2 : 2 + heads]
    with torch.inference_mode():
        torch.testing.assert_close(FusedRmsNorm(norm)(x), norm(x), rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("dim", [24, 16])
def test_rotations(dim: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 7, 24, dtype=dtype)[:, 1:5]
    angles = torch.rand(5, 1, dim) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    torch.testing.assert_close(rotate(x, cos, sin), rope.rotate(x, cos, sin), rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("gelu", [False, True])
def test_gates(gelu: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(2)
    x = (3 * torch.randn(3, 2 * 1100)).to(dtype)
    torch.testing.assert_close(gate(x, gelu), gated(x, gelu), rtol=4 * tolerance, atol=tolerance)
