"""Small random checkpoints of every supported architecture, written by transformers, and what it makes of them."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 320
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_YARN_ALL = _YARN | {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.3}
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * place for place in range(8)],
    "long_factor": [2.0 + 0.5 * place for place in range(8)],
    "original_max_position_embeddings": 512,
}
_GEMMA4 = {
    "head_dim": 16, "global_head_dim": 24, "sliding_window": 8, "final_logit_softcapping": 1.5,
    "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "num_key_value_heads": 4,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases, tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3.1": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, yarn": ("Llama", {"rope_parameters": _YARN}),
    "llama, yarn, all": ("Llama", {"rope_parameters": _YARN_ALL}),
    "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3, biases": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": (
        "Gemma3Text",
        {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
    ),
    "gemma3, tied, linear": (
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": _GEMMA_ROPES,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3, with images": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24},
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5},
    ),
    "gemma2, no caps": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma4": ("Gemma4Text", _GEMMA4),
    "gemma4, shared": (
        "Gemma4Text",
        _GEMMA4
        | {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3},
    ),
    "gemma4, experts": (
        "Gemma4Text",
        _GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 40}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "mistral, with images": ("Mistral3", {"model_type": "mistral", "sliding_window": None, "head_dim": 24}),
    "ministral3": ("Ministral3", {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.4}, "head_dim": 24}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 24, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 8}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "qwen3moe": ("Qwen3Moe", _EXPERTS | {"head_dim": 24, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2moe": ("Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen3moe, windows": ("Qwen3Moe", _EXPERTS | {"head_dim": 24, "use_sliding_window": True, "sliding_window": 8}),
    "qwen2moe, windows": (
        "Qwen2Moe",
        _EXPERTS
        | {"shared_expert_intermediate_size": 40, "num_hidden_layers": 5, "max_window_layers": 4}
        | {"use_sliding_window": True, "sliding_window": 8},
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "glm4moe": (
        "Glm4Moe",
        _EXPERTS
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "head_dim": 16,
        },
    ),
    "deepseek2": (
        "DeepseekV2",
        _EXPERTS
        | _LATENT
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.3},
    ),
    "deepseek2, greedy": (
        "DeepseekV2",
        _EXPERTS | _LATENT | {"n_routed_experts": 8, "q_lora_rank": None, "attention_bias": True},
    ),
    "deepseek3": (
        "DeepseekV3",
        _EXPERTS
        | _LATENT
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2}
        | {"rope_parameters": _YARN_ALL},
    ),
    "deepseek3, halves": (
        "DeepseekV3",
        _EXPERTS | _LATENT | {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "glm4moelite": ("Glm4MoeLite", _EXPERTS | _LATENT | {"n_routed_experts": 8, "rms_norm_eps": 1e-3}),
    "mistral4": (
        "Mistral4",
        _EXPERTS | _LATENT | {"n_routed_experts": 8, "rope_parameters": _YARN_ALL | {"llama_4_scaling_beta": 0.4}},
    ),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 8, "swiglu_limit": 0.8},
    ),
    "llama4": (
        "Llama4Text",
        {
            "intermediate_size_mlp": 56,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
            "head_dim": 16,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.4,
        },
    ),
    "qwen3.5": ("Qwen3_5Text", _DELTA_NET),
    "qwen3.5, with images": ("Qwen3_5", _DELTA_NET | {"num_hidden_layers": 3, "full_attention_interval": 3}),
    "qwen3.5moe": ("Qwen3_5MoeText", _DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3next": (
        "Qwen3Next",
        _DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "phi3": ("Phi3", {}),
    "phi3, partial, windows": ("Phi3", {"sliding_window": 8, "partial_rotary_factor": 0.5}),
    "phi3, longrope": ("Phi3", {"rope_parameters": _LONGROPE}),
    "phi3, longrope, sharpened": (
        "Phi3",
        {
            # One list for short and long sequences, of which transformers takes one or the other for each prompt.
            "rope_parameters": _LONGROPE | {"short_factor": _LONGROPE["long_factor"]},
            "original_max_position_embeddings": 32,
        },
    ),
}
NOT_NATIVE = {
    "deepseek2", "deepseek2, greedy", "deepseek3", "deepseek3, halves", "glm4moelite", "mistral4", "gemma4",
    "gemma4, shared", "gemma4, experts", "qwen3.5", "qwen3.5, with images", "qwen3.5moe", "qwen3next",
}  # fmt: skip
"""What only PyTorch computes; the native step refuses it by name."""
RECURRENT = {"qwen3.5", "qwen3.5, with images", "qwen3.5moe", "qwen3next"}
"""What has layers with recurrent state."""
_MODEL_CLASS = {
    "Gemma3Text": "Gemma3ForCausalLM",
    "Llama4Text": "Llama4ForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "Qwen3_5Text": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
}
_TINY_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_WITH_IMAGES = ("Gemma3", "Mistral3", "Qwen3_5")
"""Models whose text part is served."""


@functools.cache
def checkpoint(name: str) -> Path:
    """Return the directory of a checkpoint; made once per session."""
    return make_checkpoint(name, *ARCHITECTURES[name])


def make_checkpoint(name: str, kind: str, special: dict[str, Any]) -> Path:
    """Write a checkpoint, and return its directory; ``kind`` and ``special`` are as in ``ARCHITECTURES``."""
    torch.manual_seed(sum(map(ord, name)))
    configuration = getattr(transformers, f"{kind}Config")
    if kind in _WITH_IMAGES:
        config = configuration(text_config=SMALL | special, vision_config=_TINY_VISION)
    else:
        config = configuration(**(SMALL | special))
    model = _class_of(kind)(config).eval()
    directory = Path(_folder().name) / name.replace(", ", "-").replace(" ", "-")
    vary(model)
    model.save_pretrained(directory)
    return directory


def _class_of(kind: str) -> Any:
    suffix = "ForConditionalGeneration" if kind in _WITH_IMAGES else "ForCausalLM"
    return getattr(transformers, _MODEL_CLASS.get(kind, f"{kind}{suffix}"))


def vary(model: Any) -> None:
    """Shake norms and biases: as transformers makes them, all ones or zeros, no test could tell one from another."""
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if parameter.dim() == 1 or "bias" in name:
                parameter += 0.3 * torch.randn_like(parameter)
        if model.config.tie_word_embeddings:
            model.get_input_embeddings().weight *= 0.1  # or each token would only call for itself


@functools.cache
def reference(name: str) -> Any:
    """Return the checkpoint as a transformers model, float32, plain attention."""
    model = _class_of(ARCHITECTURES[name][0])
    return model.from_pretrained(checkpoint(name), dtype=torch.float32, attn_implementation="eager").eval()


@functools.cache
def greedy(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return the tokens that transformers generates, one prompt at a time."""
    with torch.inference_mode():
        ids = reference(name).generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, attention_mask=torch.ones(1, len(prompt))
        )
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens


def likeliest(name: str, sequences: Sequence[tuple[list[int], list[int]]]) -> list[list[int]]:
    """Return what transformers finds likeliest in place of each token of each output, which is what it generates.

    An output that it would not generate differs at its first such token. All are computed at once, which takes a
    tenth of the time of ``greedy``.

    Args:
        name: of the checkpoint.
        sequences: prompts, and what is taken for their outputs.
    """
    whole = [torch.tensor([*prompt, *output]) for prompt, output in sequences]
    padded = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)  # behind: no token sees it
    with torch.inference_mode():
        best = reference(name)(padded, use_cache=False).logits.argmax(-1)
    return [
        best[row, len(prompt) - 1 : len(prompt) + len(output) - 1].tolist()
        for row, (prompt, output) in enumerate(sequences)
    ]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inflight-checkpoints-")


def _prompts() -> list[list[int]]:
    """32 prompts of very different lengths; many share a beginning, some are equal."""
    chance = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(1, VOCAB) for _ in range(count)]

    shared = tokens(40)
    prompts = [tokens(chance.randint(1, 60)) for _ in range(14)]
    prompts += [shared[: chance.randint(1, 40)] + tokens(chance.randint(1, 12)) for _ in range(14)]
    return [*prompts, shared, shared, shared[:16], shared[:17]]


PROMPTS = _prompts()


def random_tokens(count: int, seed: int) -> list[int]:
    """Return tokens, the same for the same seed."""
    return random.Random(seed).choices(range(1, VOCAB), k=count)


LONG_PROMPT = random_tokens(200, 1)
LONG_PROMPTS = [
    *(random_tokens(length, length) for length in (1, 2, 63, 64, 65, 127, 128, 200)),
    *(
        [*LONG_PROMPT[:length], *random_tokens(own, own)]
        for length, own in ((63, 7), (64, 9), (100, 3), (128, 64), (130, 41))
    ),
    LONG_PROMPT,
    LONG_PROMPT,
    [*LONG_PROMPT[:192], 5],
]
"""16 prompts, some with a common beginning, that end and depart at and off multiples of 64."""

TOKENS = random.Random(9).choices(range(1, VOCAB), k=100)
