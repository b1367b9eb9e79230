"""Mixture of Experts: each token takes the feed-forwards that its router chooses.

A token's result does not depend on who else is routed to its experts: each expert's products add up in the same order
however many rows they have (``packed``), and what a token's experts give is added up from the best expert to the last.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.engine.models.config import ExpertsConfig, ModelConfig
from inflight.engine.models.layers import Activation, GatedMlp


def route(scores: Tensor, config: ExpertsConfig, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Args:
        scores: what the router gives each expert ``[tokens, experts]``.
        config: says how experts get their weights.
        correction: added to the sigmoids for the choice alone ``[experts]``; None: nothing is.

    Returns:
        The experts of each token ``[tokens, per_token]``, best first, and their weights, float32.
    """
    if config.routing in ("chosen_softmax", "input_sigmoid"):
        values, chosen = scores.topk(config.per_token, dim=-1)
        return chosen, values.softmax(
            dim=-1
        ).float() if config.routing == "chosen_softmax" else values.float().sigmoid()
    scores = scores.float()
    scores = scores.softmax(dim=-1) if config.routing == "softmax" else scores.sigmoid()
    corrected = scores if correction is None else scores + correction.float()
    chosen = _of_best_groups(corrected, config).topk(config.per_token)[1]
    weights = scores.gather(1, chosen)
    if config.normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen, weights * config.scale


def _of_best_groups(scores: Tensor, config: ExpertsConfig) -> Tensor:
    """Return ``scores [tokens, experts]`` with minus infinity where the group is not one of a token's best."""
    if config.groups == 1:
        return scores
    groups = scores.unflatten(1, (config.groups, -1))
    best = groups.topk(config.group_best, dim=-1)[0].sum(dim=-1).topk(config.groups_per_token, dim=-1)[1]
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)


class MoeBlock(nn.Module):
    """The experts of a layer, their router, and the feed-forward that all tokens take, if there is one."""

    def __init__(self, model: ModelConfig, config: ExpertsConfig) -> None:
        super().__init__()
        hidden, inner, gelu = model.hidden_size, config.intermediate_size, model.activation != "silu"
        self.config = config
        self.gate = nn.Linear(hidden, config.num_experts, bias=config.bias)
        self.register_parameter("correction", None)
        if config.routing == "sigmoid":
            self.correction = nn.Parameter(torch.empty(config.num_experts))
        kind = Activation(gelu, config.clamp, config.clamped_slope)
        self.experts = nn.ModuleList(GatedMlp(hidden, inner, config.bias, kind) for _ in range(config.num_experts))
        if config.shared_size:
            self.shared_expert = GatedMlp(hidden, config.shared_size, model.mlp_bias, Activation(gelu))
        if config.shared_gate:
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``."""
        chosen, weights = route(self.gate(x), self.config, self.correction)
        total = self.mix(x, chosen, weights)
        return total + self._shared(x) if self.config.shared_size else total

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return what the experts make of ``x [tokens, hidden]``, by their weights; see ``route``."""
        outputs = x.new_empty(*chosen.shape, x.shape[-1])
        scales_input = self.config.routing == "input_sigmoid"
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            weight = weights[token, place, None]
            rows = (x[token] * weight).to(x.dtype) if scales_input else x[token]
            made = self.experts[expert](rows)
            outputs[token, place] = made if scales_input else (made * weight).to(x.dtype)
        total = outputs[:, 0]
        for place in range(1, outputs.shape[1]):
            total = total + outputs[:, place]
        return total

    def _shared(self, x: Tensor) -> Tensor:
        out = self.shared_expert(x)
        if not self.config.shared_gate:
            return out
        # A number for each token: of float32 ones PyTorch computes the last few otherwise than those before them.
        return self.shared_expert_gate(x).double().sigmoid().to(x.dtype) * out
