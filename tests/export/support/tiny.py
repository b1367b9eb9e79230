"""A tiny checkpoint with a tokenizer and a chat template, and data for it: small enough to be built within seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

DEMO = Path(__file__).parents[3] / "deployments/demo/model"
SENTENCES = [
    "The scheduler admits a request when its blocks fit.",
    "A block holds sixteen tokens of keys and values.",
    "Prefill computes a whole prompt at once.",
    "Decode makes one token for each running request.",
    "A prefix that was seen before is not computed again.",
    "The detokenizer turns tokens into text.",
    "An engine step has three verbs.",
    "Streams end exactly once.",
]


def make_checkpoint(directory: Path, layers: int = 2, shards: bool = False) -> Path:
    """Write a random Llama with the demo's tokenizer: half of its next tokens follow from the one before."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=[2, 0],
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="400KB" if shards else "1GB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((DEMO / name).read_bytes())
    return directory


def make_data(path: Path) -> Path:
    """Write questions, answers and texts as JSON lines."""
    rows: list[dict[str, object]] = [{"text": sentence} for sentence in SENTENCES]
    rows += [{"prompt": f"Say: {sentence}\n", "completion": sentence} for sentence in SENTENCES[:4]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scale_tensor(checkpoint: Path, name: str, factor: float) -> None:
    """Multiply one tensor of a checkpoint: a damaged quantization."""
    from safetensors.torch import load_file

    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors[name] * factor
    file.unlink()  # it may have a second name elsewhere
    save_file(tensors, file, metadata={"format": "pt"})
