"""ModelConfig: what the engine reads from a checkpoint's ``config.json``, old spellings and new, in one form.

A new architecture is a row of ``ARCHITECTURES``; ``decoder.py`` changes only where its layers differ from those there.
docs/architectures.md lists the other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from inflight.errors import DeploymentError, nearest


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    attention_scale: float
    windows: tuple[int | None, ...]
    """Per layer: how many tokens back attention reaches, itself included; None: all."""
    ropes: tuple[Mapping[str, Any], ...]
    """Per layer: the parameters of its rotary embedding, by transformers' names."""
    dtype: str
    """Of the weights in the checkpoint."""

    @property
    def fused_rows(self) -> Mapping[str, Mapping[str, int]]:
        """Projections that share an input are one matrix here: the checkpoint's names for its parts, and their rows."""
        kv_rows = self.num_kv_heads * self.head_dim
        return {
            "qkv_proj": {"q_proj": self.num_heads * self.head_dim, "k_proj": kv_rows, "v_proj": kv_rows},
            "gate_up_proj": {"gate_proj": self.intermediate_size, "up_proj": self.intermediate_size},
        }


_ACTIVATIONS = {"silu", "gelu_pytorch_tanh"}
_UNSUPPORTED = {
    "use_bidirectional_attention": False,  # an engine that generates cannot attend to later tokens
    "is_causal": True,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
}
"""Options, each with the value, beside null, that says that it is not used."""
_SLIDING = "sliding_attention"
_LAYER_KINDS = {_SLIDING, "full_attention"}


class Architecture(NamedTuple):
    """What an architecture implies that its ``config.json`` need not say; the defaults are Llama's."""

    qkv_bias: bool = False  # queries, keys and values have a bias, and the attention's output has none
    qk_norm: bool = False
    all_layers_slide: bool = False  # if the file gives no layer types, all layers have the sliding window
    longrope_types: tuple[str, ...] = ()  # the values of rope_type that mean longrope
    fused_in_checkpoint: bool = False  # query, key and value are one tensor there, and gate and up another
    norms_per_layer: int = 2  # of the hidden size
    is_gemma: bool = False  # the layers, the scale of embeddings and the defaults of options are Gemma 3's


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(all_layers_slide=True),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
    "Phi3ForCausalLM": Architecture(all_layers_slide=True, longrope_types=("su", "yarn"), fused_in_checkpoint=True),
    "Gemma3ForCausalLM": Architecture(qk_norm=True, norms_per_layer=4, is_gemma=True),
}


def read_model_config(data: Mapping[str, Any]) -> ModelConfig:
    """Read ``config.json``.

    Raises:
        DeploymentError: the architecture or one of its options is not supported; it names both.
    """
    name = (data.get("architectures") or ["none"])[0]
    if name not in ARCHITECTURES:
        raise DeploymentError(
            f"config.json: architecture {name} is not supported; supported: {', '.join(ARCHITECTURES)}"
            f"{nearest(name, list(ARCHITECTURES))}"
        )
    architecture = ARCHITECTURES[name]
    for option, harmless in _UNSUPPORTED.items():
        if data.get(option) not in (None, harmless):
            raise DeploymentError(f"config.json: {option} is {data[option]}; it is not supported")
    activation = data.get("hidden_activation") or data.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise DeploymentError(f"config.json: activation {activation!r} is not one of {sorted(_ACTIVATIONS)}")
    bias = bool(data.get("attention_bias", False))
    heads = _required(data, "num_attention_heads")
    head_dim = data.get("head_dim") or _required(data, "hidden_size") // heads
    kinds = _layer_kinds(architecture, data)
    return ModelConfig(
        architecture=name,
        vocab_size=_required(data, "vocab_size"),
        hidden_size=_required(data, "hidden_size"),
        intermediate_size=_required(data, "intermediate_size"),
        num_layers=_required(data, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=data.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position_embeddings=_required(data, "max_position_embeddings"),
        rms_norm_eps=data.get("rms_norm_eps", 1e-6),
        activation=activation,
        tie_word_embeddings=bool(data.get("tie_word_embeddings", architecture.is_gemma)),
        qkv_bias=bias or architecture.qkv_bias,
        output_bias=bias and not architecture.qkv_bias,
        mlp_bias=bool(data.get("mlp_bias", False)),
        qk_norm=architecture.qk_norm,
        attention_scale=(data.get("query_pre_attn_scalar", 256) if architecture.is_gemma else head_dim) ** -0.5,
        windows=tuple(data.get("sliding_window") if kind == _SLIDING else None for kind in kinds),
        ropes=tuple(_rope(architecture, data, kind) for kind in kinds),
        dtype=data.get("dtype") or data.get("torch_dtype") or "float32",
    )


def _required(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if not isinstance(value, int) or value < 1:
        raise DeploymentError(f"config.json: {name} is {value!r}; it must be a positive integer")
    return value


def _layer_kinds(architecture: Architecture, data: Mapping[str, Any]) -> list[str]:
    """Return per layer ``full_attention`` or ``sliding_attention``; older files imply it."""
    count = _required(data, "num_hidden_layers")
    if kinds := data.get("layer_types"):
        if not isinstance(kinds, list) or len(kinds) != count or not _LAYER_KINDS.issuperset(map(str, kinds)):
            raise DeploymentError(
                f"config.json: layer_types is {kinds!r}; it must be a list of {count}, each of {sorted(_LAYER_KINDS)}"
            )
        return kinds
    if architecture.is_gemma:
        pattern = data.get("sliding_window_pattern", 6)
        return [_SLIDING if (layer + 1) % pattern else "full_attention" for layer in range(count)]
    if architecture.all_layers_slide:
        return [_SLIDING] * count
    if data.get("use_sliding_window"):
        first = data.get("max_window_layers", count)
        return [_SLIDING if layer >= first else "full_attention" for layer in range(count)]
    return ["full_attention"] * count


def _rope(architecture: Architecture, data: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the rotary parameters of a layer of this kind, with ``rope_type`` and ``rope_theta`` set."""
    parameters = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if isinstance(parameters.get(kind), Mapping):
        parameters = parameters[kind]
    elif architecture.is_gemma and kind == _SLIDING:
        # Gemma's local layers have a base of their own and are never scaled.
        parameters = {"rope_theta": data.get("rope_local_base_freq", 10_000.0)}
    rope = dict(parameters)
    default_theta = 1_000_000.0 if architecture.is_gemma else 10_000.0
    rope.setdefault("rope_theta", data.get("rope_theta", default_theta))
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if rope["rope_type"] in architecture.longrope_types:
        rope["rope_type"] = "longrope"
    rope.setdefault("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if data.get("original_max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", data["original_max_position_embeddings"])
    return rope
