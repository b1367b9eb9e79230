#!/usr/bin/env python3
"""Write names and shapes of the tensors of a tiny checkpoint of each family.

Run as `python tests/facts/write_tensor_names.py [family ...]`.

Each configuration of `published_configs` is made small, a model with random weights is built of it by the class of
transformers that the configuration names, and `save_pretrained` writes it. `tensor_names/<family>.json` then has

* `saved`: what the file holds. transformers 5 undoes its conversions when it saves, so that this is the published form
  of the names wherever its table of conversions is complete;
* `in_memory`: the tensors of the model that are not in the file under the same name with the same shape;
* `left_out`: the prefixes of tensors of images and sounds, which are not listed;
* `published` and `published_source`: what a published checkpoint holds, with its own sizes and types, and where that
  was found. They are written by hand, and the script keeps them.

`LAYER_CHOICES` says which layers of a family suffice to see each kind of layer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, which reads it then

import transformers
from safetensors import safe_open

FACTS = Path(__file__).parent
CONFIGS = FACTS / "published_configs"
NAMES = FACTS / "tensor_names"

# The sizes of a tiny model, for each field of a configuration that is a size.
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 40,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "num_attention_heads": 4,
    "head_dim": 8,
    "attention_head_dim": 8,
    "global_head_dim": 16,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "v_head_dim": 10,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 2,
    "n_routed_experts": 2,
    "num_local_experts": 2,
    "moe_num_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "block_dim": 32,
    "conv_dim": 32,
    "block_multiple_of": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
}
# As many as there are, but no more than this.
LIMITS = {
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "hidden_size_per_layer_input": 8,
}
VISION_SIZES: dict[str, Any] = {
    **SIZES,
    "depth": 1,
    "num_hidden_layers": 1,
    "num_heads": 4,
    "num_key_value_heads": 4,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "global_head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "mm_embed_dim": 32,
    "output_proj_dims": 32,
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields with an entry for each layer.
PER_LAYER = ("layer_types", "layer_rope_theta", "no_rope_layers", "attn_type_list")
IMAGE_PARTS = ("vision", "visual", "multi_modal", "audio", "image_newline")

# Which layers suffice, where it is not those up to the first of each kind of `layer_types`.
LAYER_CHOICES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "NemotronHForCausalLM": {"num_hidden_layers": 3, "hybrid_override_pattern": "ME*"},
    "Gemma4ForCausalLM-E2B": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": [12] * 2, "moe_topk": [2] * 2, "num_shared_expert": [1] * 2},
    "Qwen3NextForCausalLM": {"num_hidden_layers": 4},
    "DeepseekV3ForCausalLM": {"first_k_dense_replace": 1},
    "Llama4ForConditionalGeneration": {"moe_layers": [1], "interleave_moe_layer_step": 2},
    "Ernie4_5_MoeForCausalLM": {"moe_layer_end_index": 1},
    "Phi3ForCausalLM-longrope": {
        "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 3, "short_factor": [1.0] * 3}
    },
}
# Classes that older files name otherwise.
RENAMED = {"Ernie4_5_ForCausalLM": "Ernie4_5ForCausalLM"}


def as_library_reads(published: dict[str, Any]) -> dict[str, Any]:
    """Return a published configuration without what older versions of the library wrote and this one does not read."""
    text = published.get("text_config")
    if isinstance(text, dict):
        published = published | {"text_config": as_library_reads(text)}
    if "attn_temperature_tuning" in published:  # 4.51 wrote 4 for true
        published = published | {"attn_temperature_tuning": bool(published["attn_temperature_tuning"])}
    return published


def tiny(text: dict[str, Any], family: str) -> dict[str, Any]:
    """Return the text part of a configuration with small sizes and few layers."""
    small = {key: SIZES.get(key, value) if value is not None else None for key, value in text.items()}
    small |= {key: min(text[key], limit) for key, limit in LIMITS.items() if text.get(key) is not None}
    if text.get("num_key_value_heads") == text.get("num_attention_heads"):
        small["num_key_value_heads"] = SIZES["num_attention_heads"]
    small |= dict.fromkeys(TOKENS, None)
    choice = LAYER_CHOICES.get(family, {})
    kinds = choice.get("layer_types") or _up_to_each_kind(text.get("layer_types") or [])
    layers = choice.get("num_hidden_layers", max(len(kinds), 2))
    for key in PER_LAYER:
        if small.get(key):
            small[key] = small[key][:layers]
    if kinds:
        small["layer_types"] = (kinds * layers)[:layers]
    return small | {"num_hidden_layers": layers} | choice


def _up_to_each_kind(kinds: list[str]) -> list[str]:
    last_new = max((kinds.index(kind) for kind in set(kinds)), default=-1)
    return kinds[: last_new + 1]


def tiny_config(family: str, published: dict[str, Any]) -> Any:
    """Return the configuration object of a tiny model; quantized weights are replaced by plain ones."""
    published = as_library_reads(published)
    fields = {key: value for key, value in published.items() if key not in ("model_type", "quantization_config")}
    if "text_config" in fields:
        fields["text_config"] = tiny(fields["text_config"], family)
        parts = [key for key in ("vision_config", "audio_config") if fields.get(key)]
        fields |= {key: {k: VISION_SIZES.get(k, v) for k, v in fields[key].items()} for key in parts}
        if family.startswith("MuseGlimmer"):  # the record has no images' part, and the default is of a billion weights
            fields["vision_config"] = {key: VISION_SIZES[key] for key in ("hidden_size", "num_hidden_layers")}
    else:
        fields = tiny(fields, family)
    return transformers.AutoConfig.for_model(published["model_type"], **fields)


def tensors(config: Any, architecture: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the shapes of the saved tensors and of those in memory, by name."""
    model = getattr(transformers, RENAMED.get(architecture, architecture))(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            saved = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return saved, {name: list(tensor.shape) for name, tensor in model.state_dict().items()}


def _is_of_images(name: str) -> bool:
    return any(part in name for part in IMAGE_PARTS)


def entry(family: str, record: dict[str, Any]) -> dict[str, Any]:
    """Return what is written of a family, without `published`."""
    architecture = record["config"]["architectures"][0]
    config = tiny_config(family, record["config"])
    saved, in_memory = tensors(config, architecture)
    text = {name: shape for name, shape in sorted(saved.items()) if not _is_of_images(name)}
    return {
        "model": record["model"],
        "class": RENAMED.get(architecture, architecture),
        "library": f"transformers {transformers.__version__}",
        "saved": text,
        "in_memory": {
            name: shape
            for name, shape in sorted(in_memory.items())
            if saved.get(name) != shape and not _is_of_images(name)
        },
        "left_out": sorted({".".join(name.split(".")[:2]) for name in saved if _is_of_images(name)}),
    }


def encode(record: dict[str, Any]) -> str:
    """Return the record as JSON with one tensor in each line."""
    lines = []
    for key, value in record.items():
        if isinstance(value, dict) and value:
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(item)}" for name, item in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write(families: Iterable[str]) -> None:
    """Write the file of each family, all of them where none is named."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for path in sorted(CONFIGS.glob("*.json")):
        family = path.stem
        if families and family not in families:
            continue
        target = NAMES / path.name
        before = json.loads(target.read_text()) if target.exists() else {}
        by_hand = {key: value for key, value in before.items() if key.startswith("published")}
        target.write_text(encode(entry(family, json.loads(path.read_text())) | by_hand))


if __name__ == "__main__":
    write(sys.argv[1:])
