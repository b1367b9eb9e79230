"""Checkpoints of any size with random weights, made on the device they are for: in bfloat16, or as ModelOpt's FP8.

They are for speed alone. A shard holds a layer, so that no more than one is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from inflight.bench.checkpoints import Shape, llama_config
from inflight.errors import InflightError

_DEVIATION = 0.02
"""Of weights, as transformers draws them."""
_WEIGHT_SCALE, _INPUT_SCALE = 2.0**-12, 2.0**-5
"""Such that hardly a weight or an input is beyond what E4M3 holds."""
_QUANTIZATION = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}}


def random_checkpoint(shape: Shape, directory: Path, fp8: bool, device: torch.device) -> Path:
    """Write a checkpoint to ``directory``, where there is none yet, and return it.

    Raises:
        InflightError: the directory cannot be written.
    """
    if (directory / "config.json").is_file():
        return directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        places: dict[str, str] = {}
        for number, tensors in enumerate(_shards(shape, fp8, torch.Generator(device).manual_seed(0))):
            file = f"model-{number:05d}.safetensors"
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, directory / file, {"format": "pt"})
            places |= dict.fromkeys(tensors, file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        if fp8:
            (directory / "hf_quant_config.json").write_text(json.dumps(_QUANTIZATION))
        config = llama_config(shape).to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
        (directory / "config.json").write_text(json.dumps(config))  # last: with it the checkpoint is whole
    except OSError as error:
        raise InflightError(f"{error.filename or directory}: cannot be written: {error.strerror}") from None
    return directory


def _shards(shape: Shape, fp8: bool, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    hidden, inner, head_dim = shape.hidden, shape.intermediate, shape.hidden // shape.heads
    kv = shape.kv_heads * head_dim
    attention = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    linears = {f"self_attn.{name}": size for name, size in attention.items()}
    linears |= {f"mlp.{name}": size for name, size in mlp.items()}
    ends = {name: _random((shape.vocab, hidden), generator) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    yield ends | {"model.norm.weight": _ones(hidden)}
    for layer in range(shape.layers):
        above = f"model.layers.{layer}"
        tensors = {f"{above}.{name}.weight": _ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, size in linears.items():
            weight = _random(size, generator)
            tensors |= _in_fp8(f"{above}.{name}", weight) if fp8 else {f"{above}.{name}.weight": weight}
        yield tensors


def _random(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    weight = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
    return weight.normal_(0, _DEVIATION, generator=generator)


def _ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def _in_fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    return {
        f"{name}.weight": (weight.float() / _WEIGHT_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": torch.tensor(_WEIGHT_SCALE),
        f"{name}.input_scale": torch.tensor(_INPUT_SCALE),
    }
