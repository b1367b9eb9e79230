"""What each architecture implies that its ``config.json`` need not say, and how its checkpoints name their tensors.

A new architecture is a row of ``ARCHITECTURES``. docs/architectures.md lists the other files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from inflight.engine.models import expert_reading
from inflight.engine.models.config import ExpertsConfig, NormKind, Norms, QkNorm
from inflight.engine.models.fields import Fields
from inflight.engine.models.renamings import (
    AROUND,
    BEFORE,
    GEMMA4,
    GLM4,
    GLM4_MOE,
    GPT_OSS,
    LLAMA4,
    MIXTRAL,
    OLMO,
    SHARED_EXPERTS,
    Renaming,
)

ReadExperts = Callable[[Fields, int], ExpertsConfig | None]
"""Returns the experts of a layer; None: it has an ordinary feed-forward."""


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
    names: tuple[Renaming, ...] = BEFORE
    """Applied in turn to the names of modules."""
    defaults: Mapping[str, Any] = {}
    """What transformers' configuration class has where the file has nothing."""
    windows: Literal["none", "all", "used", "later", "alternate", "unrotated"] = "none"
    """Which layers have the sliding window. none; all: if the file gives one; used: all, if use_sliding_window is true.
    The others, if it is true and the file gives no layer types: later: from max_window_layers on; alternate: the first,
    third and so on before that; unrotated: those without a rotary embedding."""
    full_every: int = 0
    """If the file gives no layer types, one layer of so many has no sliding window; 0: see ``windows``."""
    reads_pattern: bool = False
    """The file may say so by ``sliding_window_pattern``."""
    last_is_full: bool = False
    """The last layer has no sliding window, whatever the file says."""
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
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA = Architecture(
    norms="around",
    norm_kind="offset",
    scaled_embeddings=True,
    names=AROUND,
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
_MISTRAL_ROPE = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MINISTRAL3_ROPE = {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384}
_MISTRAL4_ROPE = {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
_GLM_DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "rms_norm_eps": 1.5625e-07,
}
_QWEN_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}
_SIGMOID = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = _SIGMOID | {"rope_interleave": True}

_QWEN_HYBRID = Architecture(
    qk_norm="head",
    norm_kind="offset",
    recurrent_every=4,
    output_gate=True,
    predicts_ahead=True,
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
)
_HYBRID_EXPERTS = {
    "num_key_value_heads": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(
        windows="all", defaults={"sliding_window": 4096, "num_key_value_heads": 8}, text_types=("mistral",)
    ),
    "Ministral3ForCausalLM": Architecture(
        windows="all",
        query_scaling="rope",
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "rope_parameters": _MISTRAL_ROPE | _MINISTRAL3_ROPE,
        },
        text_types=("ministral3",),
    ),
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True,
        biased_output=False,
        windows="later",
        defaults=_QWEN_WINDOWS | {"num_key_value_heads": 32},
        text_types=("qwen2", "qwen2_5_vl_text"),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        qkv_bias=True,
        biased_output=False,
        windows="alternate",
        experts=expert_reading.qwen_experts,
        defaults=_QWEN_WINDOWS | {"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
    ),
    "Qwen3ForCausalLM": Architecture(
        qk_norm="head",
        windows="later",
        defaults=_QWEN_WINDOWS | {"head_dim": 128, "num_key_value_heads": 32},
        text_types=("qwen3", "qwen3_vl_text"),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        qk_norm="head",
        windows="used",
        experts=expert_reading.qwen_experts,
        stacked="either",
        defaults={"sliding_window": 4096, "num_key_value_heads": 4},
        text_types=("qwen3_moe", "qwen3_vl_moe_text"),
    ),
    "Qwen3NextForCausalLM": _QWEN_HYBRID._replace(
        interleaved_projection=True,
        experts=expert_reading.qwen_experts,
        defaults={**_QWEN_HYBRID.defaults, **_HYBRID_EXPERTS, "num_experts": 512, "num_experts_per_tok": 10},
    ),
    "Qwen3_5ForCausalLM": _QWEN_HYBRID._replace(text_types=("qwen3_5_text",)),
    "Qwen3_5MoeForCausalLM": _QWEN_HYBRID._replace(
        experts=expert_reading.normalized_qwen_experts,
        defaults={**_QWEN_HYBRID.defaults, **_HYBRID_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
        text_types=("qwen3_5_moe_text",),
    ),
    "MixtralForCausalLM": Architecture(
        windows="all",
        experts=expert_reading.mixtral_experts,
        names=(*BEFORE, *MIXTRAL),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8, "num_experts_per_tok": 2},
    ),
    "OlmoeForCausalLM": Architecture(
        qk_norm="width", experts=expert_reading.olmoe_experts, defaults={"rms_norm_eps": 1e-5, "num_experts_per_tok": 8}
    ),
    "Phi3ForCausalLM": Architecture(
        windows="all",
        longrope_types=("su", "yarn"),
        fused_in_checkpoint=True,
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    "Gemma2ForCausalLM": _GEMMA._replace(
        full_every=2,
        defaults=_GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": _GEMMA._replace(
        qk_norm="head",
        full_every=6,
        reads_pattern=True,
        sliding_rope="local",
        defaults=_GEMMA_DEFAULTS | {"rope_theta": 1e6},
        text_types=("gemma3_text",),
    ),
    "Gemma4ForCausalLM": _GEMMA._replace(
        norm_kind="wide",
        qk_norm="head",
        full_every=6,
        last_is_full=True,
        scalar=False,
        gemma4=True,
        names=(*GEMMA4, *AROUND),
        experts=expert_reading.gemma4_experts,
        defaults=_GEMMA_DEFAULTS | {"rope_parameters": _GEMMA4_ROPES, "sliding_window": 512},
        text_types=("gemma4_text", "gemma4_unified_text"),
    ),
    "GlmForCausalLM": Architecture(biased_output=False, interleaved=True, defaults=_GLM_DEFAULTS),
    "Glm4ForCausalLM": Architecture(
        biased_output=False, norms="around", names=GLM4, interleaved=True, defaults=_GLM_DEFAULTS
    ),
    "Glm4MoeForCausalLM": Architecture(
        biased_output=False,
        qk_norm="head",
        qk_norm_option="use_qk_norm",
        experts=expert_reading.sigmoid_experts,
        names=(*BEFORE, *GLM4_MOE),
        predicts_ahead=True,
        defaults=_SIGMOID
        | {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 8},
    ),
    "DeepseekV2ForCausalLM": Architecture(
        latent=True,
        interleaved=True,
        experts=expert_reading.deepseek2_experts,
        names=(*BEFORE, *SHARED_EXPERTS),
        defaults={"q_lora_rank": 1536, "topk_method": "greedy"},
    ),
    "DeepseekV3ForCausalLM": Architecture(
        latent=True,
        experts=expert_reading.sigmoid_experts,
        names=(*BEFORE, *GLM4_MOE),
        predicts_ahead=True,
        defaults=_LATENT
        | {"q_lora_rank": 1536, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        latent=True,
        experts=expert_reading.sigmoid_experts,
        names=(*BEFORE, *GLM4_MOE),
        predicts_ahead=True,
        defaults=_LATENT
        | {"q_lora_rank": 768, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 4},
    ),
    "Mistral4ForCausalLM": Architecture(
        latent=True,
        query_scaling="rope",
        experts=expert_reading.mistral4_experts,
        names=(*BEFORE, *SHARED_EXPERTS),
        defaults=_LATENT
        | {"q_lora_rank": 1024, "first_k_dense_replace": 0, "num_experts_per_tok": 4}
        | {"rope_parameters": _MISTRAL_ROPE | _MISTRAL4_ROPE},
        text_types=("mistral4",),
    ),
    "SmolLM3ForCausalLM": Architecture(
        no_rope=True,
        windows="unrotated",
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "Olmo2ForCausalLM": Architecture(
        qk_norm="width",
        norms="behind",
        norm_kind="wide",
        names=OLMO,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
    "Olmo3ForCausalLM": Architecture(
        qk_norm="width",
        norms="behind",
        norm_kind="wide",
        names=OLMO,
        full_every=4,
        sliding_rope="plain",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    ),
    "GptOssForCausalLM": Architecture(
        full_every=2,
        sinks=True,
        stacked="interleaved",
        experts=expert_reading.gpt_oss_experts,
        names=(*BEFORE, *GPT_OSS),
        defaults={
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "head_dim": 64,
            "num_key_value_heads": 8,
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
        names=(*BEFORE, *LLAMA4),
        defaults={
            "use_qk_norm": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "attention_chunk_size": 8192,
            "num_experts_per_tok": 1,
        },
        text_types=("llama4_text",),
    ),
}
"""By the name in ``architectures`` of ``config.json``."""


def _text_part(architecture: str, **defaults: Any) -> Architecture:
    row = ARCHITECTURES[architecture]
    return row._replace(defaults={**row.defaults, **defaults})


TEXT_PARTS: dict[str, Architecture] = {
    "qwen2_5_vl_text": _text_part(
        "Qwen2ForCausalLM", rope_theta=1e6, rms_norm_eps=1e-5, max_window_layers=80, num_key_value_heads=8
    ),
    "qwen3_vl_text": _text_part("Qwen3ForCausalLM", rope_theta=5e5)._replace(windows="none"),
    "qwen3_vl_moe_text": _text_part(
        "Qwen3MoeForCausalLM", rope_theta=5e5, norm_topk_prob=True, num_key_value_heads=16, num_experts_per_tok=4
    )._replace(windows="none", experts=expert_reading.normalized_qwen_experts),
    "gemma4_unified_text": _text_part("Gemma4ForCausalLM", sliding_window=1024),
}
"""Text parts, by ``model_type``, for which their file need not say all that the architecture that they are says."""
