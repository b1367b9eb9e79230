"""What is served of GGUF's architectures: which checkpoint each was made of, and what sets it apart.

What writes them: ``conversion/`` of https://github.com/ggml-org/llama.cpp. What it leaves out of a file is a constant
of llama.cpp's graph of the architecture (``src/models/``), and so it is one here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from inflight.errors import DeploymentError, nearest
from inflight.gguf.metadata import Metadata

Fields = dict[str, Any]
"""Fields of ``config.json``, by name."""
_YARN_SCALE = "rope.scaling.yarn_log_multiplier"
_SIGMOID = 2
"""``expert_gating_func``, of GGUF's numbers."""
_LAYERS_OF_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""How many layers the 27B models have: files do not say otherwise which they are."""


def _nothing(data: Metadata, config: Fields) -> Fields:
    return {}


def _gemma(data: Metadata, config: Fields) -> Fields:
    """The 27B models scale scores by the hidden size over the number of heads, which is not the size of a head."""
    is_largest = config["num_hidden_layers"] == _LAYERS_OF_LARGEST_GEMMA[data.architecture]
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


def _gemma3(data: Metadata, config: Fields) -> Fields:
    local = {"rope_type": "default", "rope_theta": data.find("rope.freq_base_swa") or 10_000.0}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return _gemma(data, config) | {"rope_parameters": ropes}


def _ministral(data: Metadata, config: Fields) -> Fields:
    # YaRN has two scales of attention; a file has only ``mscale_all_dim``, and llama.cpp takes ``mscale`` to be 1.
    scales = {"mscale": 1.0, "mscale_all_dim": data.find(_YARN_SCALE)}
    beta = {"llama_4_scaling_beta": data.find("attention.temperature_scale")}
    return {"rope_parameters": config["rope_parameters"] | beta | (scales if scales["mscale_all_dim"] else {})}


def _gpt_oss(data: Metadata, config: Fields) -> Fields:
    rope = config["rope_parameters"]
    exact = {"truncate": False} if rope["rope_type"] == "yarn" else {}
    return _experts(data, config) | {
        "rope_parameters": rope | exact,
        "intermediate_size": data.count("expert_feed_forward_length"),
    }


def _experts(data: Metadata, config: Fields) -> Fields:
    return {"num_experts": data.count("expert_count"), "num_experts_per_tok": data.count("expert_used_count")}


def _qwen3_moe(data: Metadata, config: Fields) -> Fields:
    return _experts(data, config) | {
        "moe_intermediate_size": data.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(data: Metadata, config: Fields) -> Fields:
    shared = data.count("expert_shared_feed_forward_length")
    return _qwen3_moe(data, config) | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}


def _glm4_moe(data: Metadata, config: Fields) -> Fields:
    if (gating := data.find("expert_gating_func")) not in (None, _SIGMOID):
        raise data.wrong(data.key("expert_gating_func"), gating, f"{_SIGMOID}, a sigmoid")
    return _experts(data, config) | {
        "moe_intermediate_size": data.count("expert_feed_forward_length"),
        "n_shared_experts": data.find("expert_shared_count"),
        "first_k_dense_replace": data.find("leading_dense_block_count"),
        "n_group": data.find("expert_group_count"),
        "topk_group": data.find("expert_group_used_count"),
        "routed_scaling_factor": data.find("expert_weights_scale"),
        "norm_topk_prob": data.flag("expert_weights_norm"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in data.model.tensors,
    }


class Family(NamedTuple):
    """What a file of an architecture was made of."""

    architecture: str
    """In ``architectures`` of ``config.json``."""
    names: Mapping[str, str] = {}
    """What the tensors of a layer are in the checkpoint, where it is not what ``names.INNER`` says."""
    paired_rows: bool = False
    """Whether the two rows of queries or keys that are rotated with each other lie side by side in the file."""
    norm_offset: float = 0.0
    """What is to be added to the weights of norms."""
    full_every: int = 0
    """If layers differ and the file does not say how: one of so many has no sliding window; 0: they are alike."""
    window: int | None = None
    """The sliding window, where the file does not say."""
    predicts_ahead: bool = False
    """Whether the last layers, ``nextn_predict_layers``, predict several tokens at once; they are not served."""
    reads: tuple[str, ...] = ()
    """Names of metadata that ``special`` reads. Files of families that do not read them are refused by them."""
    special: Callable[[Metadata, Fields], Fields] = _nothing
    """Returns the fields of ``config.json`` that the family has besides the common ones, or in place of them."""
    variants: tuple[tuple[str, Family], ...] = ()
    """Other families of the same ``general.architecture``: the first whose name the metadata have is taken."""


_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GLM4 = {
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_GLM4_MOE = {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN2_MOE = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_MISTRAL = Family("MistralForCausalLM", paired_rows=True)
_MINISTRAL = Family("Ministral3ForCausalLM", paired_rows=True, reads=(_YARN_SCALE,), special=_ministral)

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        paired_rows=True,
        variants=(
            ("expert_count", Family("MixtralForCausalLM", _MIXTRAL, paired_rows=True, special=_experts)),
            ("attention.sliding_window", _MISTRAL),
        ),
    ),
    "mistral3": _MISTRAL._replace(variants=(("attention.temperature_scale", _MINISTRAL),)),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen2moe": Family("Qwen2MoeForCausalLM", _QWEN2_MOE, special=_qwen2_moe),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3moe": Family("Qwen3MoeForCausalLM", special=_qwen3_moe),
    "gemma2": Family("Gemma2ForCausalLM", _AROUND, norm_offset=-1.0, full_every=2, window=4096, special=_gemma),
    "gemma3": Family("Gemma3ForCausalLM", _AROUND, norm_offset=-1.0, full_every=6, special=_gemma3),
    "phi3": Family("Phi3ForCausalLM", {"ffn_up": "mlp.gate_up_proj"}),
    "gpt-oss": Family("GptOssForCausalLM", _GPT_OSS, full_every=2, window=128, special=_gpt_oss),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _BEHIND,
        variants=(("attention.sliding_window", Family("Olmo3ForCausalLM", _BEHIND, full_every=4)),),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM", special=lambda data, config: _experts(data, config) | {"norm_topk_prob": False}
    ),
    "smollm3": Family("SmolLM3ForCausalLM", paired_rows=True),
    "glm4": Family("Glm4ForCausalLM", _GLM4),
    "glm4moe": Family("Glm4MoeForCausalLM", _GLM4_MOE, predicts_ahead=True, special=_glm4_moe),
}
"""By ``general.architecture``."""


def family_of(data: Metadata) -> Family:
    """Return the family of the checkpoint that a file was made of.

    Raises:
        DeploymentError: its architecture is not served.
    """
    if data.architecture not in FAMILIES:
        raise DeploymentError(
            f"{data.model.path}: general.architecture {data.architecture!r:.200} is not supported; supported: "
            f"{', '.join(FAMILIES)}{nearest(data.architecture, FAMILIES)}"
        )
    family = FAMILIES[data.architecture]
    return next((other for name, other in family.variants if data.find(name)), family)
