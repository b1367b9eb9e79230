"""gpt-oss with its experts in MXFP4, as it is published: a small random checkpoint, and what it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.support.checkpoints import checkpoint

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""What four bits of E2M1 are (OCP microscaling formats 1.0)."""
METHOD = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
Change = Callable[[dict[str, Tensor]], object]


def _random_blocks(experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks and scales of experts, and the weights that they are ``[experts, rows, columns]``."""
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(121, 125, (experts, rows, columns // 32), dtype=torch.uint8)
    low, high = VALUES[(blocks & 15).int()], VALUES[(blocks >> 4).int()]
    weights = torch.stack((low, high), -1).flatten(3) * 2.0 ** (scales.float()[..., None] - 127)
    return blocks, scales, weights.flatten(2)


def packed_gpt_oss(directory: Path, change: Change = lambda tensors: None, **config: Any) -> Any:
    """Write gpt-oss with packed experts, and return transformers' model with the decoded ones."""
    torch.manual_seed(3)
    model = transformers.GptOssForCausalLM.from_pretrained(
        checkpoint("gpt-oss"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tensors = load_file(checkpoint("gpt-oss") / "model.safetensors")
    for layer, block in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(block.mlp.experts, name)
            blocks, scales, decoded = _random_blocks(weight.shape[0], weight.shape[2], weight.shape[1])
            weight.data = decoded.transpose(1, 2).contiguous()
            above = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[above]
            tensors |= {f"{above}_blocks": blocks, f"{above}_scales": scales}
    change(tensors)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    data = json.loads((checkpoint("gpt-oss") / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(data | {"quantization_config": METHOD | config}))
    return model
