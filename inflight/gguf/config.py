"""What a GGUF model's metadata say of its shape, as the ``config.json`` of a Hugging Face checkpoint says it.

Keys: ``Keys`` of the ``gguf`` package; what writes them: ``conversion/`` of https://github.com/ggml-org/llama.cpp. What
is written here is what that conversion was made from, so that one reader of ``config.json`` serves both.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from inflight.errors import DeploymentError
from inflight.gguf.families import Family, family_of
from inflight.gguf.metadata import EMBEDDING, HEAD, ROPE_FACTORS, ROPE_LONG, ROPE_SHORT, Described, Metadata
from inflight.gguf.names import shares_blocks
from inflight.gguf.reader import GgufModel
from inflight.gguf.types import FLOATS
from inflight.precedence import overruled

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MOST_LAYERS, _MOST_EXPERTS, _LARGEST_HEAD = 1 << 12, 1 << 17, 1 << 12
_BIASES = ("blk.0.attn_q.bias", "blk.0.attn_output.bias")


def read_config(model: GgufModel) -> dict[str, Any]:
    """Return the ``config.json`` of a model.

    Raises:
        DeploymentError: its architecture is not served, or what must be there is missing or wrong.
    """
    data = Metadata(model)
    family = family_of(data)
    heads, hidden = (data.count(name) for name in ("attention.head_count", "embedding_length"))
    if EMBEDDING not in model.tensors or model.tensors[EMBEDDING].shape[1:] != (hidden,):
        raise DeploymentError(f"{model.path}: it has no tensor {EMBEDDING} with rows of {hidden}")
    head_dim, eps = _head_dim(data, hidden // heads), "attention.layer_norm_rms_epsilon"
    if data.find(eps) is None:
        raise data.wrong(data.key(eps), None, "there")
    window = data.find("attention.sliding_window")
    window = (family.window if window is None else window) or None
    layers = _layers(data, family)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "vocab_size": _vocabulary(data),
        "hidden_size": hidden,
        "intermediate_size": data.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": data.find("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": data.count("context_length"),
        "rms_norm_eps": data.find(eps),
        "tie_word_embeddings": HEAD not in model.tensors and not shares_blocks(model),
        "attention_bias": not model.tensors.keys().isdisjoint(_BIASES),
        "mlp_bias": "blk.0.ffn_down.bias" in model.tensors,
        "final_logit_softcapping": data.find("final_logit_softcapping"),
        "attn_logit_softcapping": data.find("attn_logit_softcapping"),
        "sliding_window": window,
        "layer_types": _layer_types(data, family, layers, window),
        "dtype": dtype_of(model),
        "rope_parameters": _rope(model, data, family, head_dim),
    }
    config["original_max_position_embeddings"] = config["rope_parameters"].get("original_max_position_embeddings")
    config |= family.special(data, config)
    _check_experts(data, config)
    said = {name: value for name, value in config.items() if value is not None}
    # A file without a window has none, whatever window the architecture has where config.json says nothing.
    return {"sliding_window": None} | said


def _vocabulary(data: Metadata) -> int:
    """Return how many tokens the model has: the rows of its embedding."""
    rows = data.model.tensors[EMBEDDING].shape[0]
    tokens = data.model.metadata.get("tokenizer.ggml.tokens")
    listed = len(tokens) if isinstance(tokens, list) else None
    for place, said in ((f"`{data.key('vocab_size')}`", data.find("vocab_size")), ("`tokenizer.ggml.tokens`", listed)):
        if said not in (None, rows):
            overruled("GGUF: vocabulary", f"{rows} rows of {EMBEDDING}", place, said)
    return rows


def _head_dim(data: Metadata, default: int) -> int:
    """Return the size of a head, of keys as of values."""
    size, values = data.find("attention.key_length") or default, data.find("attention.value_length")
    if type(size) is not int or not 1 <= size <= _LARGEST_HEAD or (values or size) != size:
        key = f"{data.key('attention.key_length')} and value_length"
        raise data.wrong(key, f"{size} and {values}", f"one positive integer, at most {_LARGEST_HEAD}")
    return size


def _layers(data: Metadata, family: Family) -> int:
    """Return how many layers there are, without those that are not served."""
    layers, most = data.count("block_count"), min(_MOST_LAYERS, len(data.model.tensors))
    if layers > most:
        raise data.wrong(data.key("block_count"), layers, f"at most {most}, as there are tensors")
    ahead = data.find("nextn_predict_layers") if family.predicts_ahead else None
    if ahead is not None and (type(ahead) is not int or not 0 <= ahead < layers):
        raise data.wrong(data.key("nextn_predict_layers"), ahead, f"a number below {layers}, the block_count")
    return layers - (ahead or 0)


def _check_experts(data: Metadata, config: dict[str, Any]) -> None:
    """Require that the tensors have as many experts as the metadata say."""
    experts, layers = config.get("num_experts", 0), config["num_hidden_layers"]
    held = {tensor.shape[0] for name, tensor in data.model.tensors.items() if name.endswith(".ffn_up_exps.weight")}
    if experts and held != {experts}:
        found = ", ".join(map(str, sorted(held)[:5])) or "those of tensors blk.*.ffn_up_exps.weight, which are missing"
        raise data.wrong(data.key("expert_count"), experts, f"as many as its tensors have: {found}")
    if experts * layers > _MOST_EXPERTS:
        raise data.wrong(data.key("expert_count"), experts, f"at most {_MOST_EXPERTS} in all {layers} layers")


def _layer_types(data: Metadata, family: Family, layers: int, window: float | None) -> list[str] | None:
    """Return ``layer_types``; None: the layers are alike."""
    if not family.full_every:
        return None
    key = data.key("attention.sliding_window_pattern")
    pattern = data.model.metadata.get(key, family.full_every)
    if window is None:
        return ["full_attention"] * layers
    if isinstance(pattern, np.ndarray) and len(pattern) == layers:
        return ["sliding_attention" if slides else "full_attention" for slides in pattern]
    if type(pattern) is not int or pattern < 1:
        raise data.wrong(key, pattern, f"a positive integer, or a list of {layers}")
    return ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]


def _rope(model: GgufModel, data: Metadata, family: Family, head_dim: int) -> dict[str, Any]:
    """Return the parameters of the rotary embedding."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": data.find("rope.freq_base") or 10_000.0}
    dimensions = data.find("rope.dimension_count") or head_dim
    if dimensions != head_dim:
        if family.paired_rows:  # ``Source.rows`` reorders whole heads
            raise data.wrong(data.key("rope.dimension_count"), dimensions, f"the size of a head, {head_dim}")
        rope["partial_rotary_factor"] = dimensions / head_dim
    tensors, length = model.tensors, data.find("rope.scaling.original_context_length")
    attention = data.find("rope.scaling.attn_factor")
    if ROPE_LONG in tensors or ROPE_SHORT in tensors:
        _require_no_scaling(data)
        longs, shorts = (_factors(model, data, name) for name in (ROPE_LONG, ROPE_SHORT))
        rope |= {"rope_type": "longrope", "long_factor": longs, "short_factor": shorts}
        length = length or data.count("context_length")
        return rope | {"original_max_position_embeddings": length, "attention_factor": attention or 1.0}
    if attention not in (None, 1.0):
        raise data.wrong(data.key("rope.scaling.attn_factor"), attention, f"1.0 without {ROPE_LONG}")
    scaled = _scaling(data, family, length)
    if ROPE_FACTORS not in tensors:
        return rope | scaled
    if scaled:
        raise _both(model, f"rope.scaling.type {scaled['rope_type']}")
    # Llama 3.1's scaling is in the file as what each frequency is divided by, which is longrope with one list.
    factors = _factors(model, data, ROPE_FACTORS)
    return rope | {
        "rope_type": "longrope", "long_factor": factors, "short_factor": factors, "factor": 1.0,
        "original_max_position_embeddings": data.count("context_length"), "attention_factor": 1.0,
    }  # fmt: skip


def _require_no_scaling(data: Metadata) -> None:
    """Require that the factors of longrope are all that scales positions."""
    key = data.key("rope.scaling.type")
    if (kind := data.text(key, "none")) not in ("none", "longrope"):
        raise data.wrong(key, kind, f"none or longrope beside {ROPE_LONG}")
    if (factor := _factor(data)) is not None:
        raise data.wrong(data.key("rope.scaling.factor"), factor, f"1.0, or left out, beside {ROPE_LONG}")
    if ROPE_FACTORS in data.model.tensors:
        raise _both(data.model, ROPE_LONG)


def _both(model: Described, other: str) -> DeploymentError:
    return DeploymentError(f"{model.path}: it has both {ROPE_FACTORS} and {other}; only one of them can be applied")


def _factor(data: Metadata) -> float | None:
    """Return what positions are divided by, by its name or the older one; None: nothing."""
    factor = data.find("rope.scaling.factor") or data.find("rope.scale_linear")
    return None if factor in (None, 0, 1.0) else factor


def _scaling(data: Metadata, family: Family, length: float | None) -> dict[str, Any]:
    """Return what ``rope.scaling`` says; {}: nothing."""
    key, factor = data.key("rope.scaling.type"), data.find("rope.scaling.factor")
    kind = data.text(key, "linear")  # as llama.cpp has it
    if kind == "none":
        return {}
    if kind == "linear":
        return {} if (factor := _factor(data)) is None else {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise data.wrong(key, kind, f"none, linear or yarn, or the file must have {ROPE_LONG}")
    for name, harmless in (("rope.scaling.yarn_ext_factor", 1.0), ("rope.scaling.yarn_log_multiplier", 0.0)):
        if name not in family.reads and (value := data.find(name)) not in (None, harmless):
            raise data.wrong(data.key(name), value, f"{harmless}, or left out")
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    rope["attention_factor"] = data.find("rope.scaling.yarn_attn_factor")
    rope["beta_fast"], rope["beta_slow"] = (data.find(f"rope.scaling.yarn_beta_{name}") for name in ("fast", "slow"))
    return {name: value for name, value in rope.items() if value is not None}


def _factors(model: GgufModel, data: Metadata, name: str) -> list[float]:
    """Return what frequencies are divided by."""
    tensor = model.tensors.get(name)
    if tensor is None or tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _LARGEST_HEAD:
        found = "missing" if tensor is None else f"{tensor.type.name} {list(tensor.shape)}"
        raise data.wrong(name, found, f"a row of F32, at most {_LARGEST_HEAD}")
    return [float(str(value)) for value in tensor.data.reshape(-1).view("<f4")]


def dtype_of(model: Described) -> str:
    """Return the type that most of the weights have; the scales of quantized ones are in float16."""
    sizes = Counter[str]()
    for tensor in model.tensors.values():
        sizes[tensor.type.name if tensor.type.name in FLOATS else "F16"] += tensor.nbytes
    return _DTYPES[sizes.most_common(1)[0][0]] if sizes else "float32"
