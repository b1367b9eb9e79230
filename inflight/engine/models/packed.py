"""Linears on a CPU, their weights laid out once as oneDNN's matrix product reads them.

This counts where rows are few, as in decoding: there a general product spends its time on reordering the weight. Each
row is also added up in the same order however many rows there are, so that a request's result does not depend on the
batch, to the last bit. In bfloat16 with AMX it does: there the order depends on the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.latent import LatentAttention, LatentProducts, head_weights
from inflight.engine.models.layers import FusedLinear, each_of

_ROWS = 32
"""The number of rows that oneDNN is told to expect; the layout is the same for any number."""
_FEW_ROWS = 4
"""The number of rows that a lone row is padded to where oneDNN has another product for a single row."""
_SHORT_COLUMNS = 1024
"""Up to so many columns, with AVX2 or newer, oneDNN adds up a lone row in the same order as a row among others.

On older processors the order always differs.
"""
_SMALL_WEIGHT = 1 << 19
"""Elements of a weight; above, oneDNN takes longer for a lone row than for a few rows."""


class PackedLinear(nn.Module):
    """Computes what the ``nn.Linear`` does that it is made from."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._outputs = linear.out_features
        self.weight = linear.weight.detach().to("meta")
        """Of the weight, the shape and type, which others' code asks for; not the values."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self._bias = linear.bias
        self._joins_lone_row = (
            linear.in_features > _SHORT_COLUMNS
            or linear.weight.numel() > _SMALL_WEIGHT
            or torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., rows]`` of ``x [..., columns]``."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self._outputs)
        if x.dim() != 2:
            return self.forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        is_joined = len(x) == 1 and self._joins_lone_row
        rows = functional.pad(x, (0, 0, 0, _FEW_ROWS - 1)) if is_joined else x
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product[:1] if is_joined else product


def pad_rows(x: Tensor) -> Tensor:
    """Return ``x [rows, ...]`` padded with zero rows to one of the numbers of rows that models are run with.

    Those are all up to 16, and eight from there to each double: at most an eighth more than there are. oneDNN compiles
    a product for each number of rows, and keeps the last 1,024, of half a megabyte each. They lie on the heap between
    activations, and the gaps that those leave are too small for longer ones: with a number of rows for each length of a
    prompt, a process grows to gigabytes.
    """
    rows = len(x)
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    missing = -rows % step
    return functional.pad(x, (*[0, 0] * (x.dim() - 1), 0, missing)) if missing else x


def has_bfloat16_products() -> bool:
    """Whether oneDNN has instructions for bfloat16 here; what it has none for it would emulate.

    Of instructions that ``ONEDNN_MAX_CPU_ISA`` forbids it refuses to pack anything.
    """
    return bool(torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> None:
    """Pack all plain linears that can be; a weight that is an embedding too stays as it is beside that.

    Packed weights are no parameters: nothing can be loaded into them or read from them.
    """
    if not torch.backends.mkldnn.is_available():
        return
    kinds = {torch.float32, *([torch.bfloat16] if has_bfloat16_products() else [])}
    for name, attention in each_of(model, LatentAttention):
        if attention.kv_a_layernorm.weight.device.type == "cpu" and attention.dtype in kinds:
            model.set_submodule(f"{name}.kv_b_proj", _latent_products(attention))
    for name, module in each_of(model, nn.Linear):
        is_plain = type(module) in (nn.Linear, FusedLinear)
        if is_plain and module.weight.device.type == "cpu" and module.weight.dtype in kinds:
            model.set_submodule(name, PackedLinear(module))


def _latent_products(attention: LatentAttention) -> LatentProducts:
    """Return the products of ``kv_b_proj`` head by head, packed."""
    packed: list[list[nn.Module]] = []
    for weights in head_weights(attention.kv_b_proj, attention.latent, attention.dtype):
        packed.append([])
        for weight in weights:
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
            packed[-1].append(PackedLinear(linear))
    return LatentProducts(*packed)
