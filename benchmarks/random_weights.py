"""Checkpoints of any size whose weights are drawn on the device that they are for: in bfloat16, or as ModelOpt's FP8.

They are for speed alone. Nothing goes through a disk: ``config.json`` is all that is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.checkpoints import Shape
from inflight.engine.shards import Shards

_DEVIATION = 0.02
"""Of weights, as transformers draws them."""
_WEIGHT_SCALE, _INPUT_SCALE = 2.0**-12, 2.0**-5
"""Such that hardly a weight or an input is beyond what E4M3 holds."""
_QUANTIZATION = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}}
_LONGEST = 131_072
"""Tokens of a sequence, as Llama 3.1 has them."""


class RandomShards(Shards):
    """Stands for a checkpoint's files; always draws the same weights."""

    def __init__(self, shape: Shape, fp8: bool, device: torch.device) -> None:
        """
        Args:
            shape: of the model.
            fp8: whether the linears of the layers are in FP8, with one scale for each.
            device: where weights are drawn.
        """
        self._linears, self._others = _linears(shape), _others(shape)
        self._fp8, self._device = fp8, device
        kinds = ("weight", "weight_scale", "input_scale") if fp8 else ("weight",)
        self.names = frozenset({f"{name}.{kind}" for name in self._linears for kind in kinds} | self._others.keys())

    def load(self, names: Collection[str], take: Callable[[str, Tensor], None]) -> None:
        """Call ``take`` with each of the tensors ``names``, one after the other."""
        generator = torch.Generator(self._device).manual_seed(0)
        for name in sorted(self.names.intersection(names)):
            take(name, self._draw(name, generator))

    def _draw(self, name: str, generator: torch.Generator) -> Tensor:
        module, _, kind = name.rpartition(".")
        if kind == "weight_scale":
            return torch.tensor(_WEIGHT_SCALE, device=self._device)
        if kind == "input_scale":
            return torch.tensor(_INPUT_SCALE, device=self._device)
        size = self._linears.get(module) or self._others[name]
        weight = torch.empty(size, dtype=torch.bfloat16, device=self._device)
        if len(size) == 1:
            return weight.fill_(1)  # a norm's
        weight.normal_(0, _DEVIATION, generator=generator)
        if self._fp8 and module in self._linears:
            return weight.div_(_WEIGHT_SCALE).clamp_(-448, 448).to(torch.float8_e4m3fn)
        return weight


def write_config(shape: Shape, directory: Path, fp8: bool) -> Path:
    """Write what a checkpoint of this shape has beside its weights to ``directory``, and return it."""
    (directory / "config.json").write_text(json.dumps(config_of(shape)))
    if fp8:
        (directory / "hf_quant_config.json").write_text(json.dumps(_QUANTIZATION))
    return directory


def config_of(shape: Shape) -> dict[str, object]:
    """Return the ``config.json`` of a Llama 3 of this shape, or where it has experts of a Qwen3-MoE."""
    kind: dict[str, object] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if experts := shape.experts:
        kind = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": shape.hidden // shape.heads,
            "num_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "moe_intermediate_size": experts.size,
            "norm_topk_prob": True,
        }
    return {
        **kind,
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": _LONGEST,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _linears(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape.hidden, shape.intermediate
    kv = shape.kv_heads * (hidden // shape.heads)
    of_layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
    }
    feed_forwards = ["mlp"]
    if experts := shape.experts:
        inner, feed_forwards = experts.size, [f"mlp.experts.{number}" for number in range(experts.count)]
        of_layer["mlp.gate"] = (experts.count, hidden)
    for name in feed_forwards:
        rows = dict.fromkeys((f"{name}.gate_proj", f"{name}.up_proj"), (inner, hidden))
        of_layer |= {**rows, f"{name}.down_proj": (hidden, inner)}
    return {f"model.layers.{layer}.{name}": size for layer in range(shape.layers) for name, size in of_layer.items()}


def _others(shape: Shape) -> dict[str, tuple[int, ...]]:
    ends = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (shape.vocab, shape.hidden))
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (shape.hidden,))
    if shape.experts:
        head = (shape.hidden // shape.heads,)
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    of_layers = {
        f"model.layers.{layer}.{name}.weight": size for layer in range(shape.layers) for name, size in norms.items()
    }
    return {**ends, **of_layers, "model.norm.weight": (shape.hidden,)}
