"""Gated DeltaNet: a layer whose memory of all tokens before is a matrix per head, and not keys and values of each.

A token's queries, keys and values pass a short causal convolution. Then the state ``S [key_dim, value_dim]`` of a head
decays, and is corrected so that the token's key is answered with its value (Gated Delta Networks, arXiv:2412.06464):

    S = exp(decay) S;  S = S + beta k (v - k S);  out = q S

One token at a time that is ``DeltaRule.decode``. ``DeltaRule.chunk`` computes the same for up to 64 tokens by products
of matrices, which rounds otherwise. So that a token's bits do not depend on how its prompt was cut, chunks begin at
multiples of 64 tokens of the sequence, and always have one shape: a shorter one is padded.

This file does not know where states are kept; ``Recur`` reads and writes them (``attention.torch_recurrence``).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.config import STATE_CHUNK, GatedDeltaNetConfig, ModelConfig
from inflight.engine.models.layers import FusedLinear, RmsNorm

_EPS = 1e-6
"""Of the norm of queries and keys; the family's own, whatever ``rms_norm_eps`` is."""


class DeltaInputs(NamedTuple):
    """What the rule takes of some tokens."""

    mixed: Tensor
    """Queries, keys and values before the convolution ``[tokens, channels]``, in the type of the computation."""
    beta: Tensor
    """How far the state is corrected, 0 to 1, float32 ``[tokens, value_heads]``."""
    decay: Tensor
    """The logarithm of what the state is multiplied by, float64 ``[tokens, value_heads]``."""

    def of(self, tokens: slice | Tensor) -> DeltaInputs:
        """Return those of some of the tokens."""
        return DeltaInputs(*(part[tokens] for part in self))

    def padded(self, count: int) -> DeltaInputs:
        """Return them with so many tokens that change no state behind them."""
        return DeltaInputs(*(functional.pad(part, (0, 0, 0, count)) for part in self))


class DeltaState(NamedTuple):
    """The state of a sequence, or of several if all have one dimension more in front."""

    conv: Tensor
    """The convolution's last inputs ``[channels, taps - 1]``, in the type of the computation."""
    matrix: Tensor
    """Float32 ``[value_heads, key_dim, value_dim]``."""


class DeltaRule:
    """The convolution and the rule of one layer."""

    def __init__(self, config: GatedDeltaNetConfig, weight: Tensor) -> None:
        """``weight``: of the convolution ``[channels, 1, taps]``."""
        self.config, self._weight = config, weight[:, 0].float()

    def decode(self, inputs: DeltaInputs, state: DeltaState) -> tuple[Tensor, DeltaState]:
        """Take one token of each of several sequences.

        Each row is computed element by element and by sums of its own, so that it does not depend on the others.
        Exponents are of float64, since PyTorch's float32 ones differ at the end of a tensor.

        Returns:
            Float32 ``[sequences, value_heads, value_dim]``, and the states behind the tokens.
        """
        window = torch.cat((state.conv, inputs.mixed[..., None]), dim=-1)
        query, key, value = self._heads(self._convolved([window[..., tap] for tap in range(self.config.taps)]))
        matrix = state.matrix * inputs.decay.exp().float()[..., None, None]
        answered = (matrix * key[..., None]).sum(-2)
        matrix = matrix + key[..., None] * ((value - answered) * inputs.beta[..., None])[..., None, :]
        return (matrix * query[..., None]).sum(-2), DeltaState(window[..., 1:], matrix)

    def chunk(self, inputs: DeltaInputs, state: DeltaState) -> tuple[Tensor, DeltaState]:
        """Take up to ``STATE_CHUNK`` tokens of one sequence.

        With the decays from the chunk's beginning, ``D``, and ``A = tril(diag(beta) (K K^T * D), -1)``, what is written
        to the state is ``(I + A)^-1 (diag(beta) (V - D K S))`` (arXiv:2406.06484, section 3.2).

        Returns:
            Float32 ``[tokens, value_heads, value_dim]``, and the state behind the tokens.
        """
        count, before = len(inputs.mixed), state.conv.t()
        window = torch.cat((before, inputs.mixed))
        conv = window[len(window) - len(before) :].t()
        mixed, beta, decay = inputs.padded(STATE_CHUNK - count)
        padded = torch.cat((before, mixed))
        heads = self._heads(self._convolved([padded[tap : tap + STATE_CHUNK] for tap in range(self.config.taps)]))
        query, key, value = (part.transpose(0, 1).contiguous() for part in heads)  # [heads, tokens, dim]
        gate, total = beta.t().contiguous()[..., None], decay.cumsum(0).t().float()  # [heads, tokens]
        since = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        from_start, to_end = total.exp()[..., None], (total[:, -1:] - total).exp()[..., None]
        system = (key * gate) @ key.transpose(1, 2) * since
        wanted = torch.cat((value * gate, key * gate * from_start), dim=-1)
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        written, read = solved.split((self.config.value_dim, self.config.key_dim), dim=-1)
        written = written - read @ state.matrix
        out = (query * from_start) @ state.matrix + (query @ key.transpose(1, 2) * since) @ written
        matrix = state.matrix * from_start[:, -1:] + (key * to_end).transpose(1, 2) @ written
        return out.transpose(0, 1)[:count], DeltaState(conv, matrix)

    def _convolved(self, taps: list[Tensor]) -> Tensor:
        """Return ``[tokens, channels]``; ``taps``: what each tap takes, of that shape, the tokens' own inputs last.

        The terms are added up one by one, in float32: a library's convolution may add them up in another order.
        """
        total = taps[0].float() * self._weight[:, 0]
        for tap, one in enumerate(taps[1:], 1):
            total = total + one.float() * self._weight[:, tap]
        return functional.silu(total.to(taps[0].dtype))

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, float32 ``[tokens, value_heads, dim]``; the first two are normalized."""
        config = self.config
        width = config.key_heads * config.key_dim
        query, key, value = mixed.float().split((width, width, config.value_heads * config.value_dim), dim=-1)
        query, key = (_unit(part.unflatten(-1, (config.key_heads, config.key_dim))) for part in (query, key))
        shared = config.value_heads // config.key_heads
        query, key = (part.repeat_interleave(shared, dim=1) for part in (query * config.key_dim**-0.5, key))
        return query, key, value.unflatten(-1, (config.value_heads, config.value_dim))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


class Recur(Protocol):
    """Takes a step's tokens from and to the states of their sequences."""

    def __call__(self, layer: int, inputs: DeltaInputs, rule: DeltaRule) -> Tensor:
        """Return float32 ``[tokens, value_heads, value_dim]``; ``layer``: its index."""


class CausalConv(nn.Module):
    """The weight of the convolution; ``DeltaRule`` computes it."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class GatedRmsNorm(RmsNorm):
    """An RMS norm whose result is multiplied by the SiLU of a gate, in float32."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        """Normalize the last dimension of ``x``, which ``gate`` has the shape and the type of."""
        return (super().forward(x) * functional.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """The layer; the names of its parameters and of the parts of its projections are those of checkpoints."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        config = model.recurrent[layer]
        self.layer, self.config = layer, config
        values = config.value_heads * config.value_dim
        self.in_proj_qkvz = FusedLinear(
            model.hidden_size, {"in_proj_qkv": config.channels, "in_proj_z": values}, bias=False
        )
        self.in_proj_ba = FusedLinear(
            model.hidden_size, {"in_proj_b": config.value_heads, "in_proj_a": config.value_heads}, bias=False
        )
        self.conv1d = CausalConv(config.channels, config.taps)
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.norm = GatedRmsNorm(config.value_dim, model.rms_norm_eps)
        self.out_proj = nn.Linear(values, model.hidden_size, bias=False)

    def forward(self, x: Tensor, recur: Recur) -> Tensor:
        """Return ``[tokens, hidden]``."""
        config = self.config
        mixed, gate = self.in_proj_qkvz(x).split((config.channels, config.value_heads * config.value_dim), dim=-1)
        beta, step = self.in_proj_ba(x).double().chunk(2, dim=-1)
        decay = -self.A_log.double().exp() * functional.softplus(step + self.dt_bias.double())
        inputs = DeltaInputs(mixed, beta.sigmoid().float(), decay)
        out = recur(self.layer, inputs, DeltaRule(config, self.conv1d.weight)).to(x.dtype)
        return self.out_proj(self.norm(out, gate.unflatten(-1, (config.value_heads, config.value_dim))).flatten(1))


def rows_by_kind(config: GatedDeltaNetConfig) -> tuple[Tensor, Tensor]:
    """Return where the rows of ``in_proj_qkvz`` and ``in_proj_ba`` are in a checkpoint that has them by heads of keys.

    There each head of keys has its query, key, values and gates in a row, and its betas and its steps.
    """
    shared = config.value_heads // config.key_heads
    values = shared * config.value_dim
    kinds = (config.key_dim, config.key_dim, values, values), (shared, shared)
    by_head = (torch.arange(config.key_heads * sum(sizes)).view(config.key_heads, -1) for sizes in kinds)
    first, second = (
        torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])
        for rows, sizes in zip(by_head, kinds, strict=True)
    )
    return first, second
