"""The ways in which steps are computed on this machine, and small models with random weights to compute them with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.engine.attention.torch_backend import QueryRange, TorchAttention
from inflight.engine.kvcache.memory_pool import Fp8KvPool, Int8KvPool, KvPool, KvScales
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.reading import read_model_config
from inflight.engine.native import bindings
from inflight.engine.native.bindings import NativeError, instruction_sets

bindings.LIBRARY = Path(os.environ.get("NATIVE_LIBRARY", bindings.LIBRARY))  # run_sanitized has one of its own
CPU = torch.device("cpu")
VOCAB = 131
try:
    SETS = instruction_sets()
except NativeError:
    SETS = []
"""The instruction sets whose kernels run here."""
CPU_STEPS = ["pytorch", *SETS]
each_step = pytest.mark.parametrize("cpu_step", CPU_STEPS)
each_set = pytest.mark.parametrize("instruction_set", SETS)
_SMALL = {
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "odd sizes": {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 72, "head_dim": 18, "num_attention_heads": 6,
        "intermediate_size": 100, "num_key_value_heads": 1,
    },
    "odd chunks": {"architectures": ["LlamaForCausalLM"], "intermediate_size": 300},
    "window": {"architectures": ["MistralForCausalLM"], "sliding_window": 70},
    "biases": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "head norms": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "gemma": {
        "architectures": ["Gemma3ForCausalLM"], "head_dim": 80, "sliding_window": 50, "sliding_window_pattern": 2,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "part rotated": {"architectures": ["Phi3ForCausalLM"], "head_dim": 96, "partial_rotary_factor": 0.5},
    "many heads": {
        "architectures": ["LlamaForCausalLM"], "head_dim": 4, "num_attention_heads": 100, "num_key_value_heads": 1,
    },
    "long groups": {"architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 384},
    "wide heads": {"architectures": ["LlamaForCausalLM"], "head_dim": 256, "num_key_value_heads": 4},
    "soft caps": {
        "architectures": ["Gemma2ForCausalLM"], "head_dim": 40, "sliding_window": 50, "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
    },
    "interleaved": {"architectures": ["Glm4ForCausalLM"], "head_dim": 24},
    "norms behind": {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 50},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], **_EXPERTS, "head_dim": 32, "norm_topk_prob": True,
        "mlp_only_layers": [0], "num_hidden_layers": 3,
    },
    "shared expert": {
        "architectures": ["Qwen2MoeForCausalLM"], **_EXPERTS, "shared_expert_intermediate_size": 140,
    },
    "groups of experts": {
        "architectures": ["Glm4MoeForCausalLM"], **_EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
        "routed_scaling_factor": 1.5, "use_qk_norm": True, "head_dim": 16, "first_k_dense_replace": 1,
    },
    "sinks": {
        "architectures": ["GptOssForCausalLM"], **_EXPERTS, "head_dim": 16, "sliding_window": 50, "swiglu_limit": 1.5,
    },
    "chunks": {
        "architectures": ["Llama4ForCausalLM"], **_EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 144,
        "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0], "head_dim": 16, "attention_chunk_size": 64,
        "floor_scale": 32, "attn_scale": 0.4,
    },
}  # fmt: skip
"""Shapes of models, by what is special about them."""
ROUTED = ("experts", "shared expert", "groups of experts", "sinks", "chunks")
"""Those whose tokens choose experts: what differs a little may choose others."""


def random_decoder(name: str, dtype: torch.dtype = torch.float32, vocab_size: int = VOCAB) -> DecoderModel:
    """Return a model of this shape; its activations are about one in size."""
    config = read_model_config(_SMALL | SHAPES[name] | {"vocab_size": vocab_size})
    model = DecoderModel(config, 4096).to(dtype)
    generator = torch.Generator().manual_seed(0)
    held = {}
    for key, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "norm" in key:
            values = values * 0.2 + (0.0 if config.norm_kind == "offset" else 1.0)
        elif "embed" not in key and parameter.dim() > 1:
            values /= parameter.shape[-1] ** 0.5
        held[key] = values.to(dtype)
    model.load_state_dict(held, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def make_pool(model: DecoderModel, kind: str, blocks: int, block_size: int) -> KvPool:
    """Return memory for keys and values of a type: float32, bfloat16, int8 or fp8."""
    config, dtype = model.config, model.model.norm.weight.dtype
    if kind == "int8":
        return Int8KvPool(config, blocks, block_size, dtype, CPU)
    if kind == "fp8":
        scales = (torch.full((config.num_layers,), scale) for scale in (0.01, 0.02))
        return Fp8KvPool(config, blocks, block_size, dtype, CPU, KvScales(*scales))
    return KvPool(config, blocks, block_size, dtype, CPU, getattr(torch, kind))


@torch.inference_mode()
def by_pytorch(
    model: DecoderModel, pool: KvPool, block_size: int, tokens: list[int], ranges: Sequence[QueryRange]
) -> Tensor:
    """Return the logits of all tokens of a step as PyTorch computes them."""
    attend = TorchAttention(pool, ranges, block_size)
    return model.logits(model(torch.tensor(tokens), attend.positions, attend))
