"""Which models transformers has code for, by the ``config.json`` alone; nothing here imports PyTorch by itself.

transformers is an optional package, and imported only where a deployment needs it.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any

from inflight.engine.models.fields import MOST_EXPERTS, MOST_LAYERS, MOST_SIZE
from inflight.engine.models.reading import CONDITIONAL, architecture_name
from inflight.errors import DeploymentError

_LIMITED = {
    "num_hidden_layers n_layer n_layers num_layers layers decoder_layers encoder_layers": MOST_LAYERS,
    "num_experts num_local_experts n_routed_experts moe_num_experts": MOST_EXPERTS,
    "vocab_size hidden_size n_embd d_model embed_dim hidden_dim": MOST_SIZE,
    "head_dim num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads": MOST_SIZE,
    "num_key_value_heads": MOST_SIZE,
}
"""The largest that a model of transformers may have: it is built before a tensor of the checkpoint is looked at."""
VERSION = "5.23"
"""The version of transformers whose models are known to do what this package takes for granted."""


def require_known(data: Mapping[str, Any]) -> None:
    """Require that transformers is there, and has code for the model of a ``config.json``.

    Raises:
        DeploymentError: it is not, or has not; it says what is missing.
    """
    architecture = architecture_name(data)
    _require_sizes(data)
    _require_version(architecture)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING_NAMES:
        if data.get("auto_map"):
            raise DeploymentError(
                f"config.json: auto_map asks for code of the checkpoint's own ({architecture}); it is never run"
            )
        raise DeploymentError(
            f"config.json: architecture {architecture} is not supported: neither Inflight nor transformers has code "
            f"for the model_type {kind!r}"
        )
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "none")
    # Some files write the name otherwise than transformers does, or name the class that it had before.
    names = {_letters(known), _letters(f"{kind}ForCausalLM"), "none"}
    if not architecture.endswith(CONDITIONAL) and _letters(architecture) not in names:
        raise DeploymentError(
            f"config.json: architecture {architecture} is no causal language model of transformers' for the model_type "
            f"{kind!r}"
        )


def require_unquantized(data: Mapping[str, Any]) -> None:
    """Require that the checkpoint of a ``config.json`` is not quantized: what decodes it knows our own linears alone.

    Raises:
        DeploymentError: it is.
    """
    described = data.get("quantization_config")
    if described:
        method = described.get("quant_method") if isinstance(described, Mapping) else described
        raise DeploymentError(f"config.json: quantization_config ({method!r}) is not supported with transformers' code")


def require_sizes_read(config: Any) -> None:
    """Require of a configuration as transformers has read it that it can be built.

    There each size goes by transformers' own name for it, however the file calls it.

    Raises:
        DeploymentError: a size is too large.
    """
    names = [name for names in _LIMITED for name in names.split()]
    for part in config.per_layer_config if config.is_heterogeneous else [config]:  # layers may have sizes of their own
        _require_sizes({name: getattr(part, name, None) for name in names})


def _require_sizes(data: Mapping[str, Any]) -> None:
    text = data.get("text_config")
    for part in (data, text if isinstance(text, Mapping) else {}):
        for names, largest in _LIMITED.items():
            for name in names.split():
                value = part.get(name)  # of whatever kind: an architecture may have a list
                if type(value) is int and value > largest:
                    raise DeploymentError(f"config.json: {name} is {value}; {largest} is the largest that is supported")


def _require_version(architecture: str) -> None:
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise DeploymentError(
            f"{architecture} needs transformers {VERSION}, which is not installed; it comes with the extra `adapter`"
        ) from None
    if found.split(".")[:2] != VERSION.split("."):
        raise DeploymentError(
            f"transformers is of version {found}; {architecture} is served with version {VERSION}, which comes with "
            "the extra `adapter`"
        )


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
