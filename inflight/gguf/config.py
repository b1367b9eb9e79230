"""What a GGUF model's metadata say of its shape, as the ``config.json`` of a Hugging Face checkpoint says it.

Keys: ``Keys`` of the ``gguf`` package; what writes them: ``conversion/`` of https://github.com/ggml-org/llama.cpp. What
is written here is what that conversion was made from, so that one reader of ``config.json`` serves both.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from inflight.errors import DeploymentError, nearest
from inflight.gguf.names import EMBEDDING, HEAD, ROPE_FACTORS, ROPE_LONG, ROPE_SHORT
from inflight.gguf.reader import GgufModel
from inflight.gguf.types import FLOATS

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""What is served, by ``general.architecture``."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GEMMA_27B_LAYERS = 62
"""Gemma 3 27B scales its scores by another size than its heads', and its files do not say so."""


class Metadata:
    """A model's metadata, read by the names that its architecture has."""

    def __init__(self, model: GgufModel) -> None:
        """
        Raises:
            DeploymentError: the architecture is not served.
        """
        self.model = model
        self.architecture = self.text("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            raise DeploymentError(
                f"{model.path}: general.architecture {self.architecture!r} is not supported; supported: "
                f"{', '.join(_ARCHITECTURES)}{nearest(self.architecture, _ARCHITECTURES)}"
            )

    def text(self, key: str, default: str = "") -> str:
        """Return a string."""
        value = self.model.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def find(self, name: str) -> Any:
        """Return a value of the architecture, e.g. of ``rope.freq_base``; None: it is not there.

        A list with one value for each layer is that value, if it is the same for all.

        Raises:
            DeploymentError: it is not the same for all, or no number.
        """
        key = f"{self.architecture}.{name}"
        value = self.model.metadata.get(key)
        if isinstance(value, np.ndarray):
            if len(distinct := np.unique(value)) != 1:
                raise self.wrong(key, value.tolist(), "the same for all layers")
            value = distinct[0].item()
        if value is not None and type(value) not in (int, float):
            raise self.wrong(key, value, "a number")
        return value

    def count(self, name: str) -> int:
        """Return a number that must be there: a positive integer."""
        value = self.find(name)
        if type(value) is not int or value < 1:
            raise self.wrong(f"{self.architecture}.{name}", value, "a positive integer")
        return value

    def wrong(self, key: str, value: Any, allowed: str) -> DeploymentError:
        """Return the error of a value."""
        return DeploymentError(f"{self.model.path}: {key} is {value!r:.200}; it must be {allowed}")


def read_config(model: GgufModel) -> dict[str, Any]:
    """Return the ``config.json`` of a model.

    Raises:
        DeploymentError: its architecture is not served, or what must be there is missing or wrong.
    """
    data = Metadata(model)
    heads, hidden, layers = (data.count(name) for name in ("attention.head_count", "embedding_length", "block_count"))
    if EMBEDDING not in model.tensors or model.tensors[EMBEDDING].shape[1:] != (hidden,):
        raise DeploymentError(f"{model.path}: it has no tensor {EMBEDDING} with rows of {hidden}")
    if layers > len(model.tensors):
        raise data.wrong(
            f"{data.architecture}.block_count", layers, f"at most {len(model.tensors)}, as there are tensors"
        )
    head_dim, eps = data.find("attention.key_length") or hidden // heads, "attention.layer_norm_rms_epsilon"
    if type(head_dim) is not int or head_dim < 1 or (data.find("attention.value_length") or head_dim) != head_dim:
        found = f"{head_dim} and {data.find('attention.value_length')}"
        raise data.wrong(f"{data.architecture}.attention.key_length and value_length", found, "one positive integer")
    if data.find(eps) is None:
        raise data.wrong(f"{data.architecture}.{eps}", None, "there")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[data.architecture]],
        "vocab_size": model.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": data.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": data.find("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": data.count("context_length"),
        "rms_norm_eps": data.find(eps),
        "tie_word_embeddings": HEAD not in model.tensors,
        "attention_bias": "blk.0.attn_output.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in model.tensors,
        "final_logit_softcapping": data.find("final_logit_softcapping"),
        "attn_logit_softcapping": data.find("attn_logit_softcapping"),
        "dtype": _dtype(model),
        "rope_parameters": _rope(data, head_dim),
    }
    config |= _special(data, config)
    return {name: value for name, value in config.items() if value is not None}


def _special(data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Return what an architecture's ``config.json`` says beside, or otherwise."""
    window = data.find("attention.sliding_window") or None
    match data.architecture:
        case "llama" if data.find("expert_count"):
            raise DeploymentError(
                f"{data.model.path}: llama.expert_count is {data.find('expert_count')}; "
                "Mixtral is not served as a GGUF file"
            )
        case "llama" if window:
            return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        case "phi3":
            return {"sliding_window": window}
        case "qwen3moe":
            return {
                "num_experts": data.count("expert_count"),
                "num_experts_per_tok": data.count("expert_used_count"),
                "moe_intermediate_size": data.count("expert_feed_forward_length"),
                "norm_topk_prob": True,  # llama.cpp's graph of this architecture always does
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        case "gemma3":
            layers, whole_heads = config["num_hidden_layers"], config["hidden_size"] // config["num_attention_heads"]
            scalar = whole_heads if layers == _GEMMA_27B_LAYERS else config["head_dim"]
            local = {"rope_type": "default", "rope_theta": data.find("rope.freq_base_swa") or 10_000.0}
            return {
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": scalar,
                "sliding_window": window,
                "layer_types": _gemma_layers(data, layers, window),
                "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
            }
    return {}


def _gemma_layers(data: Metadata, layers: int, window: int | None) -> list[str]:
    """Return the kinds of layers: every sixth attends to all tokens, or as the pattern says."""
    key = "gemma3.attention.sliding_window_pattern"
    pattern = data.model.metadata.get(key, 6)
    if window is None:
        return ["full_attention"] * layers
    if isinstance(pattern, np.ndarray) and len(pattern) == layers:
        return ["sliding_attention" if slides else "full_attention" for slides in pattern]
    if type(pattern) is not int or pattern < 1:
        raise data.wrong(key, pattern, f"a positive integer, or a list of {layers}")
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]


def _rope(data: Metadata, head_dim: int) -> dict[str, Any]:
    """Return the parameters of the rotary embedding."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": data.find("rope.freq_base") or 10_000.0}
    dimensions = data.find("rope.dimension_count") or head_dim
    if dimensions != head_dim:
        # Rows of Llama's queries and keys lie in another order, by pairs that are rotated: of all dimensions of a head.
        if data.architecture == "llama":
            raise data.wrong("llama.rope.dimension_count", dimensions, f"the size of a head, {head_dim}")
        rope["partial_rotary_factor"] = dimensions / head_dim
    tensors, length = data.model.tensors, data.find("rope.scaling.original_context_length")
    attention = data.find("rope.scaling.attn_factor")
    if ROPE_LONG in tensors or ROPE_SHORT in tensors:
        longs, shorts = (_factors(data, name) for name in (ROPE_LONG, ROPE_SHORT))
        rope |= {"rope_type": "longrope", "long_factor": longs, "short_factor": shorts}
        return rope | {"original_max_position_embeddings": length, "attention_factor": attention or 1.0}
    if attention not in (None, 1.0):
        raise data.wrong(f"{data.architecture}.rope.scaling.attn_factor", attention, f"1.0 without {ROPE_LONG}")
    scaled = _scaling(data, length)
    if ROPE_FACTORS not in tensors:
        return rope | scaled
    if scaled:
        raise DeploymentError(
            f"{data.model.path}: it has {ROPE_FACTORS} and rope.scaling.type {scaled['rope_type']}, too"
        )
    # Llama 3.1's scaling is in the file as what each frequency is divided by, which is longrope with one list.
    factors = _factors(data, ROPE_FACTORS)
    return rope | {
        "rope_type": "longrope", "long_factor": factors, "short_factor": factors, "factor": 1.0,
        "original_max_position_embeddings": data.count("context_length"), "attention_factor": 1.0,
    }  # fmt: skip


def _scaling(data: Metadata, length: int | None) -> dict[str, Any]:
    """Return what ``rope.scaling`` says; {}: nothing."""
    key = f"{data.architecture}.rope.scaling.type"
    factor = data.find("rope.scaling.factor")
    kind = data.text(key, "none")
    if kind == "none":
        older = data.find("rope.scale_linear")
        return {"rope_type": "linear", "factor": older} if older not in (None, 1.0) else {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise data.wrong(key, kind, f"none, linear or yarn, or the file must have {ROPE_LONG}")
    for name in ("yarn_ext_factor", "yarn_log_multiplier"):
        if data.find(f"rope.scaling.{name}") not in (None, 1.0 if name == "yarn_ext_factor" else 0.0):
            raise data.wrong(f"{data.architecture}.rope.scaling.{name}", data.find(f"rope.scaling.{name}"), "left out")
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    rope["attention_factor"] = data.find("rope.scaling.yarn_attn_factor")
    rope["beta_fast"], rope["beta_slow"] = (data.find(f"rope.scaling.yarn_beta_{name}") for name in ("fast", "slow"))
    return {name: value for name, value in rope.items() if value is not None}


def _factors(data: Metadata, name: str) -> list[float]:
    """Return what frequencies are divided by."""
    tensor = data.model.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or len(tensor.shape) != 1:
        found = "missing" if tensor is None else f"{tensor.type.name} {list(tensor.shape)}"
        raise data.wrong(name, found, "a row of F32")
    return [float(str(value)) for value in tensor.data.reshape(-1).view("<f4")]


def _dtype(model: GgufModel) -> str:
    """Return the type that most of the weights have; the scales of quantized ones are in float16."""
    sizes = Counter[str]()
    for tensor in model.tensors.values():
        sizes[tensor.type.name if tensor.type.name in FLOATS else "F16"] += tensor.data.size
    return _DTYPES[sizes.most_common(1)[0][0]]
