"""What the tests of compiling share: checkpoints of a few architectures, and upstream's tools as stand-ins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from inflight.export.compile.request import CompileRequest

FAKES = Path(__file__).resolve().parents[1] / "fakes"
HOPPER, ADA, BLACKWELL, AMPERE = (9, 0), (8, 9), (10, 0), (8, 0)


def write_checkpoint(directory: Path, architecture: str = "LlamaForCausalLM", **more: object) -> Path:
    """Write the config.json of a Hugging Face checkpoint of this architecture."""
    directory.mkdir(parents=True, exist_ok=True)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {
        "architectures": [architecture],
        "vocab_size": 128,
        "intermediate_size": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config | sizes | more))
    return directory


def request(directory: Path, **settings: object) -> CompileRequest:
    """Return a request for a TensorRT engine of the checkpoint ``directory/hf``."""
    values: dict[str, object] = {
        "checkpoint": directory / "hf",
        "output_dir": directory / "engine",
        "precision": "bf16",
        "compute_capability": HOPPER,
        "max_batch_size": 16,
        "max_tokens_per_step": 1024,
        "max_sequence_length": 512,
        "flow": "tensorrt",
        "examples": directory / "examples",
    }
    return CompileRequest(**(values | settings))  # type: ignore[arg-type]


def install_tools(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay the stand-ins out as the image has the real tools."""
    for script, name in (
        ("quantization", "quantize.py"),
        ("models/core/llama", "convert_checkpoint.py"),
        ("models/core/qwen", "convert_checkpoint.py"),
        ("eagle", "convert_checkpoint.py"),
    ):
        folder = directory / "examples" / script
        folder.mkdir(parents=True)
        (folder / name).symlink_to(FAKES / name)
    monkeypatch.setenv("PATH", f"{FAKES / 'bin'}:{os.environ['PATH']}")
