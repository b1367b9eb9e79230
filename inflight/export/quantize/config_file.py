"""A checkpoint's ``config.json`` for every reader: the original's keys, rotary embeddings in both forms.

transformers 5 writes a rotary embedding as ``rope_parameters``. transformers 4, on which TensorRT-LLM 1.2 stands, knows
``rope_theta``, ``rope_scaling``, ``partial_rotary_factor`` and Gemma's ``rope_local_base_freq``. It ignores the newer
key without a word and computes with a base of 10,000 and no scaling. transformers 5 reads the older keys too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.text.files import read_json
from inflight.trtllm.arguments import misread

NAME = "config.json"
_QUANTIZATION = "quantization_config"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_APART = ("rope_theta", "partial_rotary_factor")
"""Parameters that stand beside ``rope_scaling`` in the older form."""
_LONGROPE = ("short_factor", "long_factor")
"""All that Phi-3's older form has in ``rope_scaling`` beside the type."""


def write_config(original: Path, exported: Path) -> None:
    """Replace the ``config.json`` of ModelOpt's export by the original's, with what the export says of its types."""
    config = with_older_rope(read_json(original / NAME))
    quantization = read_json(exported / NAME).get(_QUANTIZATION)
    added = {} if quantization is None else {_QUANTIZATION: quantization}
    (exported / NAME).write_text(json.dumps(config | added, indent=2) + "\n", encoding="utf-8")


def has_older_rope(config: Mapping[str, Any]) -> bool:
    """Return whether transformers 4 reads the rotary embedding of this ``config.json``."""
    return not config.get("rope_parameters") or ("rope_theta" in config and not any(misread(config)))


def with_older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` that says its rotary embedding in both forms; one that has the older form is as it was.

    So is one for which the older form has no words, because kinds of layers differ in more than Gemma's do.
    """
    if has_older_rope(config):
        return dict(config)
    parameters = config["rope_parameters"]
    by_kind = {kind: dict(value) for kind, value in parameters.items() if isinstance(value, Mapping)}
    rope = by_kind.get(_FULL) or next(iter(by_kind.values()), dict(parameters))
    added, sliding = _older(config, rope), by_kind.get(_SLIDING, rope)
    if config.get("model_type") == "gemma3_text" and sliding.get("rope_type", "default") == "default":
        added["rope_local_base_freq"] = sliding.get("rope_theta", 10_000.0)
    elif sliding != rope:
        return dict(config)
    return {**config, **added}


def _older(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    added = {name: rope[name] for name in _APART if name in rope}
    if kind == "default":
        return added | {"rope_scaling": None}
    if config.get("model_type") == "phi3":  # it insists on these three, and on ``type``
        scaling = {"type": kind} | {name: rope[name] for name in _LONGROPE}
        length = rope.get("original_max_position_embeddings")
        added |= {} if length is None else {"original_max_position_embeddings": length}
    else:
        scaling = {name: value for name, value in rope.items() if name not in _APART}
    return added | {"rope_scaling": scaling}
