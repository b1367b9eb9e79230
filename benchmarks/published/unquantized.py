"""Writes the Hugging Face checkpoint that a published GGUF file stands for: what `inflight build` takes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from inflight.engine.checkpoint import load_config, load_model, outline_model, plain_name
from inflight.engine.quant.linears import QuantizedLinear
from inflight.gguf.checkpoint import open_gguf

_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_checkpoint(gguf: Path, target: Path) -> None:
    """Write a Llama's weights, decoded, in bfloat16 to the new directory ``target``, with configuration and tokenizer.

    Raises:
        DeploymentError: the file cannot be read.
    """
    described, config, device = open_gguf(gguf), load_config(gguf), torch.device("cpu")
    longest = config.max_position_embeddings
    loaded = load_model(outline_model(gguf, config, torch.float32, device, longest, "auto", separate=True), device)
    modules = {loaded.naming.of(plain_name(loaded.model, path)): one for path, one in loaded.model.named_modules()}

    def decoded(name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        one = modules[module]
        return one.decode(torch.float32) if isinstance(one, QuantizedLinear) else one.get_parameter(kind)

    target.mkdir(parents=True)
    with torch.inference_mode():
        tensors = {name: decoded(name).to(torch.bfloat16).contiguous() for name in described.tensors}
    # A GGUF file has no word for a shared table; the model's own checkpoint has it once.
    tied = torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    if tied:
        del tensors["lm_head.weight"]
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    changed = {"dtype": "bfloat16", "model_type": "llama", "tie_word_embeddings": tied}
    (target / "config.json").write_text(json.dumps(described.config | changed))
    for name in _FILES:
        (target / name).write_bytes(described.read(name) or b"{}")
