"""Reads ``config.json`` into a ``ModelConfig``: old spellings and new, and the text part of models with images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.engine.models.architectures import ARCHITECTURES, TEXT_PARTS, Architecture
from inflight.engine.models.config import (
    AttentionConfig,
    GatedDeltaNetConfig,
    Gemma4Config,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    QkNorm,
    QueryScaling,
)
from inflight.engine.models.expert_reading import check_experts
from inflight.engine.models.fields import (
    AMOUNT,
    COUNT,
    DTYPE,
    FLAG,
    INDEX,
    NUMBER,
    SIZE,
    SWITCH,
    Fields,
    checked,
)
from inflight.engine.models.gemma4_reading import gemma4_layers
from inflight.engine.models.layer_kinds import (
    CHUNKED,
    FULL,
    RECURRENT,
    SLIDING,
    layer_kinds,
    rotated_layers,
    sliding_window,
)
from inflight.engine.models.rope_reading import read_rope
from inflight.engine.models.yarn import yarn_sharpening
from inflight.errors import DeploymentError, nearest
from inflight.precedence import overruled

CONDITIONAL = "ForConditionalGeneration"
"""The end of the names of architectures that also take images or sound; their text parts are served."""
_BACKBONE, _CAUSAL = "Model", "ForCausalLM"
"""The ends of the names of a model without its head, and with it."""
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
"""Recurrent layers have the first alone: transformers has it behind their convolution, too."""
_UNSUPPORTED = {
    "use_bidirectional_attention": (False, "vision"),  # text cannot attend to later tokens, and images are not served
    "is_causal": (True,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "mamba_ssm_dtype": ("float32",),
    "clip_qkv": (),
}
"""Options, each with the values, beside null, that say that it is not used."""
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def is_known(data: Mapping[str, Any]) -> bool:
    """Return whether there is a row for the architecture of a ``config.json``; its options may not be supported yet."""
    name, text = architecture_name(data), data.get("text_config")
    if name.endswith(CONDITIONAL) and isinstance(text, Mapping):
        return any(text.get("model_type") in row.text_types for row in ARCHITECTURES.values())
    return _with_head(name) in ARCHITECTURES


def require_usual_files(data: Mapping[str, Any]) -> None:
    """Require that the weights are where all checkpoints have them.

    Raises:
        DeploymentError: by ``config.json`` they are elsewhere, where transformers would look for them.
    """
    if data.get("transformers_weights") is not None:
        raise DeploymentError(
            f"config.json: transformers_weights is {data['transformers_weights']!r}; it is not supported"
        )


def architecture_name(data: Mapping[str, Any]) -> str:
    """Return the first name in ``architectures`` of a ``config.json``."""
    names = data.get("architectures")
    return str(names[0] if isinstance(names, list) and names else names or "none")


def _with_head(name: str) -> str:
    """Return the name of the causal language model that a backbone belongs to; of all else, the name itself."""
    whole = f"{name.removesuffix(_BACKBONE)}{_CAUSAL}"
    return whole if name.endswith(_BACKBONE) and whole in ARCHITECTURES else name


def read_model_config(data: Mapping[str, Any]) -> ModelConfig:
    """Read ``config.json``.

    Raises:
        DeploymentError: the architecture or one of its options is not supported; it names both.
    """
    name, text = _text_part(data)
    own = TEXT_PARTS.get(str(text.get("model_type"))) if text is not data else None
    architecture = own or ARCHITECTURES[name]
    fields = Fields(text, architecture.defaults)
    for option, harmless in _UNSUPPORTED.items():
        value = fields.data.get(option)
        if value is not None and value not in harmless and not (architecture.softcaps and option in _SOFTCAPS):
            raise DeploymentError(f"config.json: {option} is {value}; it is not supported")
    gate = fields.given("attn_output_gate", architecture.output_gate, FLAG)
    if gate != architecture.output_gate:  # the reference does not read it: an architecture has the gate, or has not
        raise DeploymentError(f"config.json: attn_output_gate is {gate}; it is not supported")
    names = ("hidden_activation", "hidden_act")
    activation = next((fields.data[name] for name in names if fields.data.get(name) is not None), "silu")
    known = _ACTIVATIONS[:1] if architecture.recurrent_every else _ACTIVATIONS
    if activation not in known:
        raise DeploymentError(f"config.json: activation {activation!r} is not one of {list(known)}")
    hidden_size = fields.required("hidden_size")
    return ModelConfig(
        architecture=name,
        vocab_size=fields.required("vocab_size"),
        hidden_size=hidden_size,
        layers=_layers(architecture, fields),
        max_position_embeddings=fields.required("max_position_embeddings", COUNT),
        rms_norm_eps=fields.given("rms_norm_eps", 1e-6, NUMBER),
        activation=activation,
        tie_word_embeddings=fields.given("tie_word_embeddings", False, FLAG),
        mlp_bias=fields.given("mlp_bias", False, FLAG),
        dtype=stored_dtype(data),
        is_text_part=text is not data,
        norms=architecture.norms,
        norm_kind=architecture.norm_kind,
        embedding_scale=hidden_size**0.5 if architecture.scaled_embeddings else 1.0,
        logit_softcap=fields.given("final_logit_softcapping", 0, AMOUNT) or None,
        gemma4=_gemma4(fields) if architecture.gemma4 else None,
        published_as=architecture_name(data),
        is_base=architecture_name(data) != _with_head(architecture_name(data)),
    )


def stored_dtype(data: Mapping[str, Any]) -> str:
    """Return the type of the weights by ``config.json``: what stands outside wins over what a text part says.

    Raises:
        DeploymentError: it is one that no weights are in.
    """
    text = data.get("text_config")
    said = [
        (name, str(checked(name, part[name], DTYPE)))
        for part in (data, text if isinstance(text, Mapping) else {})
        for name in ("dtype", "torch_dtype")
        if part.get(name) is not None
    ]
    for name, dtype in said[1:]:
        if dtype != said[0][1]:
            overruled("type of the weights", f"`{said[0][0]}` {said[0][1]}", f"another `{name}`", dtype)
    return said[0][1] if said else "float32"


def _text_part(data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the architecture of the model's text part, and the fields of that part."""
    name, text = architecture_name(data), data.get("text_config")
    if name.endswith(CONDITIONAL) and isinstance(text, Mapping):
        kind = text.get("model_type")
        for architecture, row in ARCHITECTURES.items():
            if kind in row.text_types:
                tied = {key: data[key] for key in ("tie_word_embeddings",) if data.get(key) is not None}
                return architecture, dict(text) | tied
        known = sorted(kind for row in ARCHITECTURES.values() for kind in row.text_types)
        raise DeploymentError(
            f"config.json: the text part of {name} is of model_type {kind!r}, which is not supported; supported: "
            f"{', '.join(known)}"
        )
    if _with_head(name) not in ARCHITECTURES:
        raise DeploymentError(
            f"config.json: architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}"
            f"{nearest(name, list(ARCHITECTURES))}"
        )
    return _by_model_type(_with_head(name), data), data


def _by_model_type(name: str, data: Mapping[str, Any]) -> str:
    """Return the architecture of the ``model_type``, where that is another one that is known than ``name``."""
    kind = data.get("model_type")
    if not isinstance(kind, str):
        return name
    named = {_squeezed(one.removesuffix(_CAUSAL)): one for one in ARCHITECTURES}
    meant = named.get(_squeezed(kind).removesuffix("text"))
    if meant in (None, name):
        return name
    overruled("architecture", f"`model_type` {kind!r}", "`architectures`", data.get("architectures"))
    return meant


def _squeezed(name: str) -> str:
    return name.replace("_", "").lower()


def _layers(architecture: Architecture, fields: Fields) -> tuple[LayerConfig, ...]:
    kinds = layer_kinds(architecture, fields)
    rotated = rotated_layers(architecture, fields, len(kinds))
    layers, attentions = list[LayerConfig](), dict[tuple[str, bool], AttentionConfig]()
    for index, kind in enumerate(kinds):
        experts = architecture.experts(fields, index) if architecture.experts else None
        has_both = experts is None or architecture.gemma4
        size = fields.required(architecture.dense_size) if has_both else 0
        if kind == RECURRENT:
            layers.append(LayerConfig(None, size, experts, _gated_delta_net(architecture, fields)))
        else:
            alike = kind, rotated[index]
            if alike not in attentions:
                attentions[alike] = _attention(architecture, fields, *alike)
            layers.append(LayerConfig(attentions[alike], size, experts))
    check_experts([layer.experts for layer in layers if layer.experts is not None])
    if all(layer.attention is None for layer in layers):
        raise DeploymentError("config.json: no layer has attention; that is not supported")
    return gemma4_layers(fields, kinds, layers) if architecture.gemma4 else tuple(layers)


def _gemma4(fields: Fields) -> Gemma4Config:
    vocab = fields.given("vocab_size_per_layer_input", 262_144, COUNT)
    return Gemma4Config(fields.given("hidden_size_per_layer_input", 256, INDEX), vocab)


def _gated_delta_net(architecture: Architecture, fields: Fields) -> GatedDeltaNetConfig:
    key_heads, value_heads = (fields.required(f"linear_num_{kind}_heads") for kind in ("key", "value"))
    taps = fields.required("linear_conv_kernel_dim")
    if value_heads % key_heads or taps < 2:
        raise DeploymentError(
            f"config.json: linear_num_key_heads is {key_heads}, linear_num_value_heads {value_heads} and "
            f"linear_conv_kernel_dim {taps}; the first must divide the second, and the third must be at least 2"
        )
    return GatedDeltaNetConfig(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.required("linear_key_head_dim"),
        value_dim=fields.required("linear_value_head_dim"),
        taps=taps,
        interleaved=architecture.interleaved_projection,
    )


def _attention(architecture: Architecture, fields: Fields, kind: str, rotated: bool) -> AttentionConfig:
    if architecture.latent:
        return _latent_attention(architecture, fields)
    heads = fields.required("num_attention_heads")
    kv_heads = fields.given("num_key_value_heads", heads, COUNT)
    head_dim = fields.given("head_dim", fields.required("hidden_size") // heads, SIZE)
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise DeploymentError(
            f"config.json: num_attention_heads is {heads}, num_key_value_heads {kv_heads} and head_dim {head_dim}; "
            "the second must divide the first, and the third must be even"
        )
    scalar = fields.given("query_pre_attn_scalar", head_dim, NUMBER) if architecture.scalar else head_dim
    if architecture.gemma4:
        scalar = 1.0
    bias = fields.given("attention_bias", False, FLAG)
    rope = read_rope(architecture, fields, kind, head_dim) if rotated else None
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scalar**-0.5,
        qkv_bias=bias or architecture.qkv_bias,
        output_bias=bias and architecture.biased_output,
        qk_norm=_qk_norm(architecture, fields, rotated),
        window=sliding_window(fields) if kind == SLIDING else None,
        chunk=fields.given("attention_chunk_size", None, COUNT) if kind == CHUNKED else None,
        rope=rope,
        interleaved=architecture.interleaved,
        query_scaling=_query_scaling(architecture, fields, rope),
        softcap=fields.given("attn_logit_softcapping", 0, AMOUNT) or None,
        sinks=architecture.sinks,
        output_gate=architecture.output_gate,
    )


def _latent_attention(architecture: Architecture, fields: Fields) -> AttentionConfig:
    latent = LatentConfig(
        rank=fields.required("kv_lora_rank"),
        query_rank=fields.given("q_lora_rank", None, SIZE),
        nope_dim=fields.required("qk_nope_head_dim"),
        rope_dim=fields.required("qk_rope_head_dim"),
        value_dim=fields.required("v_head_dim"),
        eps=1e-6,  # whatever rms_norm_eps says
    )
    if latent.rope_dim % 2:
        raise DeploymentError(f"config.json: qk_rope_head_dim is {latent.rope_dim}; it must be even")
    rope = dict(read_rope(architecture, fields, FULL, latent.rope_dim))
    scale = (latent.nope_dim + latent.rope_dim) ** -0.5
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
        if "factor" not in rope:
            raise DeploymentError(f"config.json: rope_type {rope['rope_type']!r} needs 'factor', which is not there")
        scale *= yarn_sharpening(rope["factor"], rope["mscale_all_dim"]) ** 2
    bias = fields.given("attention_bias", False, FLAG)
    return AttentionConfig(
        num_heads=fields.required("num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.rank + latent.rope_dim,
        scale=scale,
        qkv_bias=bias,
        output_bias=bias,
        rope=rope,
        interleaved=architecture.interleaved or fields.given("rope_interleave", False, FLAG),
        query_scaling=_query_scaling(architecture, fields, rope),
        latent=latent,
    )


def _qk_norm(architecture: Architecture, fields: Fields, rotated: bool) -> QkNorm:
    option = architecture.qk_norm_option
    if option is not None and not fields.given(option, False, FLAG):
        return "none"
    return architecture.qk_norm if architecture.qk_norm != "unit" or rotated else "none"


def _query_scaling(architecture: Architecture, fields: Fields, rope: Mapping[str, Any] | None) -> QueryScaling | None:
    if architecture.query_scaling == "no_rope" and rope is None:
        if not fields.given("attn_temperature_tuning", True, SWITCH):
            return None
        return QueryScaling(fields.given("attn_scale", 0.1, AMOUNT), fields.given("floor_scale", 8192, COUNT), offset=1)
    if architecture.query_scaling == "rope" and rope is not None and rope.get("llama_4_scaling_beta"):
        name = "original_max_position_embeddings"
        length = int(rope.get(name) or fields.required("max_position_embeddings", COUNT))
        return QueryScaling(rope["llama_4_scaling_beta"], checked(name, length, COUNT))
    return None
