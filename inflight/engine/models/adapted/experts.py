"""Experts of transformers' models, computed so that a token's result does not depend on its neighbours.

A router is the model's own. What it chooses is computed here: each expert's products are linears, which can be packed
as any other, and what a token's experts give is added up in the order in which the router has chosen them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inflight.errors import DeploymentError

NAME = "inflight"
"""The name of this way to compute experts in a model's configuration."""
_MARK = "_is_expert_parallel"
"""An attribute of transformers' experts that say how their weights lie."""
PER_TOKEN = "_inflight_per_token"
"""An attribute that a dry run gives to experts: how many of them a token has."""


def register() -> None:
    """Make the name known to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, _outlined)


def _outlined(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, *_: Tensor) -> Tensor:
    """In a dry run: what experts give has the shape of what they get. ``replace_experts`` takes them out afterwards."""
    assert hidden_states.is_meta
    setattr(module, PER_TOKEN, top_k_index.shape[-1])
    return torch.empty_like(hidden_states)


def replace_experts(model: nn.Module) -> None:
    """Put ours in place of the experts of a loaded model."""
    for name in [name for name, module in model.named_modules() if hasattr(module, _MARK)]:
        model.set_submodule(name, AdaptedExperts(name, model.get_submodule(name)))


class AdaptedExperts(nn.Module):
    """The experts of one layer."""

    def __init__(self, name: str, source: Any) -> None:
        """``source``: transformers', whose weights are taken over.

        Raises:
            DeploymentError: they are not in tensors of all experts.
        """
        super().__init__()
        first = "gate_up_proj" if source.has_gate else "up_proj"
        self.up, self.down = (_linears(name, source, one) for one in (first, "down_proj"))
        self._activation = source._apply_gate if source.has_gate else source.act_fn
        self.norm = source.post_expert_norm if source.has_post_expert_norm else nn.Identity()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return ``[tokens, hidden]`` of the experts ``top_k_index [tokens, k]``, weighted by ``top_k_weights``."""
        outputs = hidden_states.new_empty(*top_k_index.shape, hidden_states.shape[-1])
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            made = self.norm(self.down[expert](self._activation(self.up[expert](hidden_states[token]))))
            outputs[token, place] = (made * top_k_weights[token, place, None]).to(outputs.dtype)
        total = outputs[:, 0]
        for place in range(1, outputs.shape[1]):
            total = total + outputs[:, place]
        return total


def _linears(name: str, source: Any, kind: str) -> nn.ModuleList:
    """Return a linear of each expert. The weights of all are one tensor, ``[experts, rows, columns]`` or transposed."""
    weights, biases = getattr(source, kind, None), getattr(source, f"{kind}_bias", None)
    if not isinstance(weights, nn.Parameter) or weights.dim() != 3:
        raise DeploymentError(f"{name}: its experts have no {kind} of three dimensions; they are not supported")
    setattr(source, kind, None)
    made = nn.ModuleList()
    for index, weight in enumerate(weights.data):
        own = weight.t().contiguous() if source.is_transposed else weight
        linear = nn.Linear(own.shape[1], own.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(own, requires_grad=False)
        if source.has_bias and biases is not None:
            linear.bias = nn.Parameter(biases.data[index], requires_grad=False)
        made.append(linear)
    return made
