"""ModelConfig: what the engine reads from a checkpoint's ``config.json``, old spellings and new, in one form.

A new architecture is a row of ``ARCHITECTURES``; ``decoder.py`` changes only where its layers differ from those there.
docs/architectures.md lists the other files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
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


_Kind = tuple[Callable[[Any], bool], str]
"""What a value of ``config.json`` must be, as a test and in words."""
_FLAG: _Kind = (lambda value: isinstance(value, bool)), "true or false"
_MOST = 2**31 - 1
_COUNT: _Kind = (lambda value: type(value) is int and 1 <= value <= _MOST), "a positive integer below 2^31"
_LENGTH: _Kind = (lambda value: type(value) is int and value >= 1), "a positive integer"
_INDEX: _Kind = (lambda value: type(value) is int and value >= 0), "0 or a positive integer"
_NUMBER: _Kind = (lambda value: _is_number(value) and value > 0), "a number above 0"
_AMOUNT: _Kind = (lambda value: _is_number(value) and value >= 0), "0 or a number above 0"
_FACTORS: _Kind = (lambda value: isinstance(value, list) and all(map(_NUMBER[0], value))), "a list of numbers above 0"
_OF_ROPE = {
    "factor": _NUMBER,
    "original_max_position_embeddings": _NUMBER,
    "low_freq_factor": _NUMBER,
    "high_freq_factor": _NUMBER,
    "attention_factor": _NUMBER,
    "beta_fast": _AMOUNT,
    "beta_slow": _AMOUNT,
    "mscale": _AMOUNT,
    "mscale_all_dim": _AMOUNT,
    "truncate": _FLAG,
    "short_factor": _FACTORS,
    "long_factor": _FACTORS,
}
"""The parameters of rotary embeddings."""
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
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
    names = data.get("architectures")
    name = str(names[0] if isinstance(names, list) and names else names or "none")
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
        raise DeploymentError(f"config.json: activation {activation!r} is not one of {list(_ACTIVATIONS)}")
    bias = _given(data, "attention_bias", False, _FLAG)
    heads = _required(data, "num_attention_heads")
    kv_heads = _given(data, "num_key_value_heads", heads, _COUNT)
    head_dim = _given(data, "head_dim", _required(data, "hidden_size") // heads, _COUNT)
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise DeploymentError(
            f"config.json: num_attention_heads is {heads}, num_key_value_heads {kv_heads} and head_dim {head_dim}; "
            "the second must divide the first, and the third must be even"
        )
    scalar = _given(data, "query_pre_attn_scalar", 256, _NUMBER) if architecture.is_gemma else head_dim
    kinds = _layer_kinds(architecture, data)
    return ModelConfig(
        architecture=name,
        vocab_size=_required(data, "vocab_size"),
        hidden_size=_required(data, "hidden_size"),
        intermediate_size=_required(data, "intermediate_size"),
        num_layers=_required(data, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_required(data, "max_position_embeddings"),
        rms_norm_eps=_given(data, "rms_norm_eps", 1e-6, _NUMBER),
        activation=activation,
        tie_word_embeddings=_given(data, "tie_word_embeddings", architecture.is_gemma, _FLAG),
        qkv_bias=bias or architecture.qkv_bias,
        output_bias=bias and not architecture.qkv_bias,
        mlp_bias=_given(data, "mlp_bias", False, _FLAG),
        qk_norm=architecture.qk_norm,
        attention_scale=scalar**-0.5,
        windows=tuple(_window(data) if kind == _SLIDING else None for kind in kinds),
        ropes=tuple(_rope(architecture, data, kind, head_dim) for kind in kinds),
        dtype=data.get("dtype") or data.get("torch_dtype") or "float32",
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _window(data: Mapping[str, Any]) -> int | None:
    """Return the sliding window, at most as long as any context: some files say none by the largest number they can."""
    window = _given(data, "sliding_window", None, _LENGTH)
    return window and min(window, _MOST)


def _required(data: Mapping[str, Any], name: str) -> int:
    return int(_checked(name, data.get(name), _COUNT))


def _given(data: Mapping[str, Any], name: str, default: Any, kind: _Kind) -> Any:
    """Return a value that may be left out, or null."""
    return default if data.get(name) is None else _checked(name, data[name], kind)


def _checked(name: str, value: Any, kind: _Kind) -> Any:
    if not kind[0](value):
        raise DeploymentError(f"config.json: {name} is {value!r}; it must be {kind[1]}")
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
        pattern = _given(data, "sliding_window_pattern", 6, _COUNT)
        return [_SLIDING if (layer + 1) % pattern else "full_attention" for layer in range(count)]
    if architecture.all_layers_slide:
        return [_SLIDING] * count
    if data.get("use_sliding_window"):
        first = _given(data, "max_window_layers", count, _INDEX)
        return [_SLIDING if layer >= first else "full_attention" for layer in range(count)]
    return ["full_attention"] * count


def _rope(architecture: Architecture, data: Mapping[str, Any], kind: str, head_dim: int) -> Mapping[str, Any]:
    """Return the rotary parameters of a layer of this kind, with ``rope_type`` and ``rope_theta`` set."""
    parameters = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise DeploymentError(f"config.json: the parameters of RoPE are {parameters!r}; an object is expected")
    if isinstance(parameters.get(kind), Mapping):
        parameters = parameters[kind]
    elif architecture.is_gemma and kind == _SLIDING:
        # Gemma's local layers have a base of their own and are never scaled.
        parameters = {"rope_theta": data.get("rope_local_base_freq", 10_000.0)}
    rope = {name: value for name, value in parameters.items() if value is not None}
    default_theta = 1_000_000.0 if architecture.is_gemma else 10_000.0
    rope["rope_theta"] = _given(rope, "rope_theta", _given(data, "rope_theta", default_theta, _NUMBER), _NUMBER)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if rope["rope_type"] in architecture.longrope_types:
        rope["rope_type"] = "longrope"
    if data.get("original_max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", data["original_max_position_embeddings"])
    for name, kind_of in _OF_ROPE.items():
        value = _given(rope, name, None, kind_of)
        if type(value) is int:
            rope[name] = float(value)  # PyTorch takes no integers of more than 64 bits
    share = _given(rope, "partial_rotary_factor", _given(data, "partial_rotary_factor", 1.0, _NUMBER), _NUMBER)
    if share > 1 or int(head_dim * share) % 2 or not int(head_dim * share):
        raise DeploymentError(
            f"config.json: partial_rotary_factor is {share} and head_dim {head_dim}; the first must be at most 1, and "
            "their product an even number"
        )
    rope["partial_rotary_factor"] = share
    rope["rope_theta"] = float(rope["rope_theta"])
    return rope
