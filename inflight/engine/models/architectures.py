"""What each architecture implies that its ``config.json`` need not say, and how its checkpoints name their tensors.

A new architecture is a row of ``ARCHITECTURES``. docs/architectures.md lists the other files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from inflight.engine.models import expert_reading
from inflight.engine.models.config import ExpertsConfig, NormKind, Norms, QkNorm
from inflight.engine.models.fields import Fields

Renaming = tuple[str, str]
"""A regular expression for a part of a name here, and what the checkpoint has in its place."""
ReadExperts = Callable[[Fields, int], ExpertsConfig | None]
"""Returns the experts of a layer; None: it has an ordinary feed-forward."""

_BEFORE: tuple[Renaming, ...] = (
    (r"\.attention_norm\b", ".input_layernorm"),
    (r"\.mlp_norm\b", ".post_attention_layernorm"),
)
_AROUND: tuple[Renaming, ...] = (
    (r"\.attention_norm\b", ".input_layernorm"),
    (r"\.attention_output_norm\b", ".post_attention_layernorm"),
    (r"\.mlp_norm\b", ".pre_feedforward_layernorm"),
    (r"\.mlp_output_norm\b", ".post_feedforward_layernorm"),
)
_GLM4: tuple[Renaming, ...] = (
    *_BEFORE,
    (r"\.attention_output_norm\b", ".post_self_attn_layernorm"),
    (r"\.mlp_output_norm\b", ".post_mlp_layernorm"),
)
_OLMO: tuple[Renaming, ...] = (
    (r"\.attention_output_norm\b", ".post_attention_layernorm"),
    (r"\.mlp_output_norm\b", ".post_feedforward_layernorm"),
)
_MIXTRAL: tuple[Renaming, ...] = (
    (r"\.mlp\.", ".block_sparse_moe."),
    (r"(\.experts\.\d+)\.gate_proj\b", r"\1.w1"),
    (r"(\.experts\.\d+)\.up_proj\b", r"\1.w3"),
    (r"(\.experts\.\d+)\.down_proj\b", r"\1.w2"),
)
_SHARED_EXPERTS: tuple[Renaming, ...] = ((r"\.shared_expert\.", ".shared_experts."),)
_GLM4_MOE: tuple[Renaming, ...] = (
    *_SHARED_EXPERTS,
    (r"\.mlp\.correction\b", ".mlp.gate.e_score_correction_bias"),
)
_GEMMA4: tuple[Renaming, ...] = (
    (r"\.moe\.gate\b", ".router.proj"),
    (r"\.moe\.scale\b", ".router.scale"),
    (r"\.moe\.per_expert_scale\b", ".router.per_expert_scale"),
    (r"\.moe\.experts\b", ".experts"),
    (r"\.moe\.mlp_norm\b", ".post_feedforward_layernorm_1"),
    (r"\.moe\.output_norm\b", ".post_feedforward_layernorm_2"),
    (r"\.moe\.input_norm\b", ".pre_feedforward_layernorm_2"),
)
_GPT_OSS: tuple[Renaming, ...] = ((r"\.mlp\.gate\b", ".mlp.router"),)
_LLAMA4: tuple[Renaming, ...] = (
    (r"\.mlp\.gate\b", ".feed_forward.router"),
    (r"\.mlp\.", ".feed_forward."),
)


class Architecture(NamedTuple):
    """What an architecture implies; the defaults are Llama's."""

    qkv_bias: bool = False
    """Queries, keys and values have a bias whatever ``attention_bias`` says."""
    biased_output: bool = True
    """Where ``attention_bias`` is true, the attention's output has a bias too."""
    qk_norm: QkNorm = "none"
    qk_norm_option: str | None = None
    """The option that says whether there is a ``qk_norm``; None: there is."""
    norms: Norms = "before"
    norm_kind: NormKind = "plain"
    scaled_embeddings: bool = False
    """Embeddings are multiplied by the root of their size."""
    names: tuple[Renaming, ...] = _BEFORE
    """Applied in turn to the names of modules."""
    defaults: Mapping[str, Any] = {}
    """What transformers' configuration class has where the file has nothing."""
    all_layers_slide: bool = False
    """If the file gives no layer types, all layers have the sliding window, if it gives one."""
    full_every: int = 0
    """If the file gives no layer types, one layer of so many has no sliding window; 0: see ``all_layers_slide``."""
    sliding_rope: Literal["shared", "plain", "local"] = "shared"
    """Of layers with a sliding window, unless the file says: that of all layers; that, never scaled; or one with a base
    of its own, never scaled."""
    interleaved: bool = False
    no_rope: bool = False
    """``no_rope_layers`` says which layers have a rotary embedding: all but one of ``no_rope_layer_interval``."""
    query_scaling: Literal["rope", "no_rope"] | None = None
    """Queries grow with their position: by the parameters of the rotary embedding, or in layers without one."""
    chunked: bool = False
    """Layers with a rotary embedding attend within chunks."""
    softcaps: bool = False
    """There may be soft caps of scores and logits."""
    scalar: bool = False
    """``query_pre_attn_scalar`` scales the scores, in place of the size of a head."""
    sinks: bool = False
    gemma4: bool = False
    """Layers are as Gemma 4 has them (``gemma4``)."""
    latent: bool = False
    """Attention is latent (``config.LatentConfig``)."""
    longrope_types: tuple[str, ...] = ()
    """The values of ``rope_type`` that mean longrope."""
    fused_in_checkpoint: bool = False
    """Query, key and value are one tensor there, and gate and up another."""
    experts: ReadExperts | None = None
    stacked: Literal["plain", "transposed", "interleaved", "either"] = "plain"
    """How the experts lie where the checkpoint has those of a layer in one tensor. plain: ``[experts, rows, columns]``,
    gate above up; transposed: ``[experts, columns, rows]``; interleaved: besides, rows of gate and up take turns;
    either: plain or transposed, by the shape."""
    dense_size: str = "intermediate_size"
    """The name of the intermediate size of layers without experts."""
    recurrent_every: int = 0
    """All layers but one of so many are Gated DeltaNet, unless the file gives layer types; 0: all have attention."""
    interleaved_projection: bool = False
    """``GatedDeltaNetConfig.interleaved``."""
    output_gate: bool = False
    predicts_ahead: bool = False
    """Behind its last layer, or beside all, a checkpoint has more, which predict several tokens at once."""
    text_types: tuple[str, ...] = ()
    """``model_type`` of the text parts of ``...ForConditionalGeneration`` that this is."""


_GEMMA_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA = Architecture(
    norms="around",
    norm_kind="offset",
    scaled_embeddings=True,
    names=_AROUND,
    softcaps=True,
    scalar=True,
)
_GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GLM_DEFAULTS = {"partial_rotary_factor": 0.5, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-07}

_QWEN_HYBRID = Architecture(
    qk_norm="head",
    norm_kind="offset",
    recurrent_every=4,
    output_gate=True,
    predicts_ahead=True,
    defaults={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(all_layers_slide=True, text_types=("mistral",)),
    "Ministral3ForCausalLM": Architecture(
        all_layers_slide=True,
        query_scaling="rope",
        defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
        text_types=("ministral3",),
    ),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, biased_output=False, text_types=("qwen2", "qwen2_5_vl_text")),
    "Qwen2MoeForCausalLM": Architecture(qkv_bias=True, biased_output=False, experts=expert_reading.qwen_experts),
    "Qwen3ForCausalLM": Architecture(qk_norm="head", defaults={"head_dim": 128}, text_types=("qwen3", "qwen3_vl_text")),
    "Qwen3MoeForCausalLM": Architecture(
        qk_norm="head",
        experts=expert_reading.qwen_experts,
        stacked="either",
        text_types=("qwen3_moe", "qwen3_vl_moe_text"),
    ),
    "Qwen3NextForCausalLM": _QWEN_HYBRID._replace(
        interleaved_projection=True,
        experts=expert_reading.qwen_experts,
        defaults={
            **_QWEN_HYBRID.defaults,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "Qwen3_5ForCausalLM": _QWEN_HYBRID._replace(text_types=("qwen3_5_text",)),
    "Qwen3_5MoeForCausalLM": _QWEN_HYBRID._replace(
        experts=expert_reading.qwen_experts,
        defaults={
            **_QWEN_HYBRID.defaults,
            "norm_topk_prob": True,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
        text_types=("qwen3_5_moe_text",),
    ),
    "MixtralForCausalLM": Architecture(
        all_layers_slide=True,
        experts=expert_reading.mixtral_experts,
        names=(*_BEFORE, *_MIXTRAL),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "num_experts_per_tok": 2},
    ),
    "OlmoeForCausalLM": Architecture(
        qk_norm="width", experts=expert_reading.olmoe_experts, defaults={"rms_norm_eps": 1e-5, "num_experts_per_tok": 8}
    ),
    "Phi3ForCausalLM": Architecture(all_layers_slide=True, longrope_types=("su", "yarn"), fused_in_checkpoint=True),
    "Gemma2ForCausalLM": _GEMMA._replace(
        full_every=2,
        defaults=_GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": _GEMMA._replace(
        qk_norm="head",
        full_every=6,
        sliding_rope="local",
        defaults=_GEMMA_DEFAULTS | {"rope_theta": 1e6},
        text_types=("gemma3_text",),
    ),
    "Gemma4ForCausalLM": _GEMMA._replace(
        norm_kind="wide",
        qk_norm="head",
        full_every=6,
        scalar=False,
        gemma4=True,
        names=(*_GEMMA4, *_AROUND),
        experts=expert_reading.gemma4_experts,
        defaults=_GEMMA_DEFAULTS | {"rope_parameters": _GEMMA4_ROPES, "sliding_window": 512},
        text_types=("gemma4_text", "gemma4_unified_text"),
    ),
    "GlmForCausalLM": Architecture(biased_output=False, interleaved=True, defaults=_GLM_DEFAULTS),
    "Glm4ForCausalLM": Architecture(
        biased_output=False, norms="around", names=_GLM4, interleaved=True, defaults=_GLM_DEFAULTS
    ),
    "Glm4MoeForCausalLM": Architecture(
        biased_output=False,
        qk_norm="head",
        qk_norm_option="use_qk_norm",
        experts=expert_reading.sigmoid_experts,
        names=(*_BEFORE, *_GLM4_MOE),
        predicts_ahead=True,
        defaults={
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "DeepseekV2ForCausalLM": Architecture(
        latent=True,
        experts=expert_reading.deepseek2_experts,
        names=(*_BEFORE, *_SHARED_EXPERTS),
    ),
    "DeepseekV3ForCausalLM": Architecture(
        latent=True,
        experts=expert_reading.sigmoid_experts,
        names=(*_BEFORE, *_GLM4_MOE),
        predicts_ahead=True,
        defaults={"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        latent=True,
        experts=expert_reading.sigmoid_experts,
        names=(*_BEFORE, *_GLM4_MOE),
        predicts_ahead=True,
        defaults={"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "num_experts_per_tok": 4},
    ),
    "Mistral4ForCausalLM": Architecture(
        latent=True,
        query_scaling="rope",
        experts=expert_reading.mistral4_experts,
        names=(*_BEFORE, *_SHARED_EXPERTS),
        defaults={"num_experts_per_tok": 4},
        text_types=("mistral4",),
    ),
    "SmolLM3ForCausalLM": Architecture(
        no_rope=True, defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4}
    ),
    "Olmo2ForCausalLM": Architecture(
        qk_norm="width",
        norms="behind",
        norm_kind="wide",
        names=_OLMO,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "Olmo3ForCausalLM": Architecture(
        qk_norm="width",
        norms="behind",
        norm_kind="wide",
        names=_OLMO,
        full_every=4,
        sliding_rope="plain",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "GptOssForCausalLM": Architecture(
        full_every=2,
        sinks=True,
        stacked="interleaved",
        experts=expert_reading.gpt_oss_experts,
        names=(*_BEFORE, *_GPT_OSS),
        defaults={
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "head_dim": 64,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "rope_parameters": _GPT_OSS_ROPE,
        },
    ),
    "Llama4ForCausalLM": Architecture(
        qk_norm="unit",
        qk_norm_option="use_qk_norm",
        interleaved=True,
        no_rope=True,
        query_scaling="no_rope",
        chunked=True,
        stacked="transposed",
        experts=expert_reading.llama4_experts,
        dense_size="intermediate_size_mlp",
        names=(*_BEFORE, *_LLAMA4),
        defaults={
            "use_qk_norm": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "head_dim": 128,
            "attention_chunk_size": 8192,
            "num_experts_per_tok": 1,
        },
        text_types=("llama4_text",),
    ),
}
"""By the name in ``architectures`` of ``config.json``."""
