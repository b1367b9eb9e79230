"""How each architecture's ``config.json`` describes its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inflight.engine.models.config import ExpertsConfig
from inflight.engine.models.fields import (
    AMOUNT,
    COUNT,
    EXPERTS,
    FLAG,
    INDEX,
    INDICES,
    LAYERS,
    MOST_EXPERTS_OF_ALL,
    NUMBER,
    Fields,
)
from inflight.errors import DeploymentError


def qwen_experts(fields: Fields, layer: int) -> ExpertsConfig | None:
    """Read those of Qwen2-MoE, which has a shared expert besides, and of Qwen3-MoE."""
    step = fields.given("decoder_sparse_step", 1, COUNT)
    if layer in fields.given("mlp_only_layers", [], INDICES) or (layer + 1) % step:
        return None
    shared = fields.given("shared_expert_intermediate_size", 0, INDEX)
    return ExpertsConfig(
        num_experts=num_experts(fields),
        per_token=fields.required("num_experts_per_tok"),
        intermediate_size=fields.required("moe_intermediate_size"),
        routing="softmax",
        normalized=fields.given("norm_topk_prob", False, FLAG),
        shared_size=shared,
        shared_gate=shared > 0,
    )


def normalized_qwen_experts(fields: Fields, layer: int) -> ExpertsConfig | None:
    """Read those of Qwen3.5-MoE and Qwen3-VL-MoE, whose weights are divided by their sum without asking the file."""
    _require(fields, "norm_topk_prob", True)
    return qwen_experts(fields, layer)


def mixtral_experts(fields: Fields, layer: int) -> ExpertsConfig:
    """Read those of Mixtral."""
    return ExpertsConfig(
        num_experts=num_experts(fields),
        per_token=fields.required("num_experts_per_tok"),
        intermediate_size=fields.required("intermediate_size"),
        routing="softmax",
        normalized=True,
    )


def olmoe_experts(fields: Fields, layer: int) -> ExpertsConfig:
    """Read those of OLMoE, which are Mixtral's but for the sum of their weights."""
    return replace(mixtral_experts(fields, layer), normalized=fields.given("norm_topk_prob", False, FLAG))


def gpt_oss_experts(fields: Fields, layer: int) -> ExpertsConfig:
    """Read those of gpt-oss."""
    return ExpertsConfig(
        num_experts=num_experts(fields),
        per_token=fields.required("num_experts_per_tok"),
        intermediate_size=fields.required("intermediate_size"),
        routing="chosen_softmax",
        normalized=True,
        bias=True,
        clamp=fields.given("swiglu_limit", 7.0, NUMBER),
        clamped_slope=fields.given("swiglu_alpha", 1.702, NUMBER),
    )


def sigmoid_experts(fields: Fields, layer: int) -> ExpertsConfig | None:
    """Read those of GLM-4 MoE and DeepSeek-V3."""
    _require(fields, "scoring_func", "sigmoid")
    _require(fields, "topk_method", "noaux_tc")
    return _grouped_experts(fields, layer)


def _grouped_experts(fields: Fields, layer: int) -> ExpertsConfig | None:
    if _is_dense(fields, layer):
        return None
    size = fields.required("moe_intermediate_size")
    return ExpertsConfig(
        num_experts=num_experts(fields),
        per_token=fields.required("num_experts_per_tok"),
        intermediate_size=size,
        routing="sigmoid",
        normalized=fields.given("norm_topk_prob", False, FLAG),
        scale=fields.given("routed_scaling_factor", 1.0, AMOUNT),
        groups=fields.required("n_group", COUNT),
        groups_per_token=fields.required("topk_group", COUNT),
        shared_size=size * fields.given("n_shared_experts", 1, INDEX),
    )


def deepseek2_experts(fields: Fields, layer: int) -> ExpertsConfig | None:
    """Read those of DeepSeek-V2."""
    if _is_dense(fields, layer):
        return None
    _require(fields, "scoring_func", "softmax")
    _require(fields, "norm_topk_prob", False)
    method = fields.data.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise DeploymentError(
            f"config.json: topk_method is {method!r}; supported are 'greedy' and 'group_limited_greedy'"
        )
    grouped, size = method != "greedy", fields.required("moe_intermediate_size")
    return ExpertsConfig(
        num_experts=num_experts(fields),
        per_token=fields.required("num_experts_per_tok"),
        intermediate_size=size,
        routing="softmax",
        normalized=False,
        scale=fields.given("routed_scaling_factor", 1.0, AMOUNT),
        groups=fields.required("n_group", COUNT) if grouped else 1,
        groups_per_token=fields.required("topk_group", COUNT) if grouped else 1,
        group_best=1,
        shared_size=size * fields.given("n_shared_experts", 2, INDEX),
    )


def mistral4_experts(fields: Fields, layer: int) -> ExpertsConfig | None:
    """Read those of Mistral 4, which routes by softmax and is else as DeepSeek-V3."""
    _require(fields, "scoring_func", "softmax")
    experts = _grouped_experts(fields, layer)
    return experts and replace(experts, routing="softmax")


def _require(fields: Fields, name: str, computed: str | bool) -> None:
    """Require that the file, if it has a field that transformers does not read, says what is computed."""
    value = fields.data.get(name)
    if value is not None and value != computed:
        raise DeploymentError(f"config.json: {name} is {value!r}; only {computed!r} is supported here")


def _is_dense(fields: Fields, layer: int) -> bool:
    """Return whether a layer has an ordinary feed-forward, by either way of saying it."""
    kinds = fields.data.get("mlp_layer_types")
    if kinds is None:
        return bool(layer < fields.given("first_k_dense_replace", 0, INDEX))
    count = fields.required("num_hidden_layers", LAYERS)
    if not isinstance(kinds, list) or len(kinds) != count or not {"dense", "sparse"}.issuperset(map(str, kinds)):
        raise DeploymentError(
            f"config.json: mlp_layer_types is {kinds!r}; it must be a list of {count}, each dense or sparse"
        )
    return kinds[layer] == "dense"


def gemma4_experts(fields: Fields, layer: int) -> ExpertsConfig | None:
    """Read those of Gemma 4, which are beside the feed-forward."""
    if not fields.given("enable_moe_block", False, FLAG):
        return None
    return ExpertsConfig(
        num_experts=num_experts(fields),
        per_token=fields.required("top_k_experts"),
        intermediate_size=fields.required("moe_intermediate_size"),
        routing="softmax",
        normalized=True,
    )


def llama4_experts(fields: Fields, layer: int) -> ExpertsConfig | None:
    """Read those of Llama 4, where a part of the layers has them."""
    step = fields.given("interleave_moe_layer_step", 1, COUNT)
    layers = fields.given("moe_layers", None, INDICES)
    if (layer + 1) % step if layers is None else layer not in layers:
        return None
    return ExpertsConfig(
        num_experts=num_experts(fields),
        per_token=fields.required("num_experts_per_tok"),
        intermediate_size=fields.required("intermediate_size"),
        routing="input_sigmoid",
        normalized=False,
        shared_size=fields.required("intermediate_size"),
    )


def check_experts(layers: Sequence[ExpertsConfig]) -> None:
    """Require that the numbers in the layers' experts go together. Raises DeploymentError: they do not."""
    for experts in dict.fromkeys(layers):
        count, groups, kept = experts.num_experts, experts.groups, experts.groups_per_token
        if experts.per_token > count:
            raise DeploymentError(f"config.json: num_experts_per_tok is {experts.per_token}; there are {count} experts")
        if (
            count % groups
            or kept > groups
            or experts.per_token > count // groups * kept
            or (groups > 1 and count < 2 * groups)
        ):
            raise DeploymentError(
                f"config.json: n_group is {groups} and topk_group {kept} for {count} experts, {experts.per_token} for "
                "each token; the groups must be of one size, two at the least, and those kept must have enough experts"
            )
    if (total := sum(experts.num_experts for experts in layers)) > MOST_EXPERTS_OF_ALL:
        raise DeploymentError(
            f"config.json: all layers together have {total} experts; {MOST_EXPERTS_OF_ALL} are supported"
        )


def num_experts(fields: Fields) -> int:
    """Return the number of experts, by whichever of its names the file has."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return fields.required(next((name for name in names if name in fields.data), names[0]), EXPERTS)
