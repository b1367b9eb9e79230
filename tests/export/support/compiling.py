"""What the tests of compiling share: checkpoints of a few architectures, and upstream's tools as stand-ins."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from inflight.export.compile.steps import CompileRequest
from inflight.settings.speculation import SpeculationSettings

FAKES = Path(__file__).resolve().parents[2] / "fakes"


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
        "model_dir": directory / "hf",
        "output_dir": directory / "engine",
        "precision": "bf16",
        "group": 128,
        "max_batch_size": 16,
        "max_tokens_per_step": 1024,
        "max_sequence_length": 512,
        "kv_dtype": "auto",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "speculation": SpeculationSettings(),
        "calibration": directory / "data/train.jsonl",
        "examples": directory / "examples",
        "python": "python3",
        "trtllm_build": "trtllm-build",
    }
    return CompileRequest(**(values | settings))  # type: ignore[arg-type]


def install_tools(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay the stand-ins out as the image has the real tools, and data to calibrate with."""
    (directory / "data").mkdir()
    (directory / "data/train.jsonl").write_text('{"text": "In-flight batching"}\n')
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
