"""A quarter of gpt-oss-20b with random weights: every fourth of its layers and of its vocabulary, each as it is.

So the parts of a token's time are those of the whole model. Experts are packed in MXFP4, as openai/gpt-oss-20b has
them; all else is in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.checkpoints import Experts, Shape

if TYPE_CHECKING:  # it takes seconds to load, and only making a checkpoint needs it
    from torch import Tensor

GPT_OSS = Shape("gpt-oss-5.2B-A0.9B", 5.22e9, 50_272, 2880, 2880, 6, 64, 8, Experts(32, 4, 2880, packed=True))
"""A token goes through 0.9 billion of its parameters, without the embedding."""
_HEAD = 64
_BLOCK = 32
"""Weights that share a power of two."""
_DEVIATION = 0.02
_EXPONENTS = (119, 122)
"""Of the powers of two in E8M0, from and to below: random values of E2M1 become weights of about ``_DEVIATION``."""
_PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def gpt_oss_config(shape: Shape) -> dict[str, object]:
    """Return the ``config.json`` of a gpt-oss of this shape.

    Raises:
        ValueError: the shape has no experts.
    """
    experts = _experts(shape)
    kinds = ["sliding_attention", "full_attention"]
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": _HEAD,
        "layer_types": [kinds[layer % 2] for layer in range(shape.layers)],
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _PLAIN},
    }


def gpt_oss_tensors(shape: Shape) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the checkpoint by their names there; they are always the same.

    Raises:
        ValueError: the shape has no experts.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, size in gpt_oss_sizes(shape):
        if name.endswith("_blocks"):
            yield name, torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        elif name.endswith("_scales"):
            yield name, torch.randint(*_EXPONENTS, size, dtype=torch.uint8, generator=generator)
        elif name.endswith("norm.weight"):
            yield name, torch.ones(size, dtype=torch.bfloat16)
        else:
            yield name, torch.empty(size, dtype=torch.bfloat16).normal_(0, _DEVIATION, generator=generator)


def _experts(shape: Shape) -> Experts:
    if shape.experts is None:
        raise ValueError(f"{shape.name} has no experts; a gpt-oss has some")
    return shape.experts


def gpt_oss_sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names of the checkpoint's tensors and their shapes.

    Raises:
        ValueError: the shape has no experts.
    """
    experts = _experts(shape)
    hidden, queries, keys = shape.hidden, shape.heads * _HEAD, shape.kv_heads * _HEAD
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        above = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{above}.{norm}.weight", (hidden,)
        for name, rows, columns in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.router", experts.count, hidden),
        ):
            yield f"{above}.{name}.weight", (rows, columns)
            yield f"{above}.{name}.bias", (rows,)
        yield f"{above}.self_attn.sinks", (shape.heads,)
        for name, rows, columns in (
            ("gate_up_proj", 2 * experts.size, hidden),
            ("down_proj", hidden, experts.size),
        ):
            yield f"{above}.mlp.experts.{name}_blocks", (experts.count, rows, columns // _BLOCK, _BLOCK // 2)
            yield f"{above}.mlp.experts.{name}_scales", (experts.count, rows, columns // _BLOCK)
            yield f"{above}.mlp.experts.{name}_bias", (experts.count, rows)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab, hidden)
