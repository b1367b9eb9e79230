"""What `inflight models` says of a model on a machine: the planner's word, whatever the model is."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.export.models import judge
from inflight.export.plan.gpus import find_gpu
from inflight.hub.model_manifest import ModelFile, ModelManifest, now
from inflight.hub.staging import in_units
from inflight.resources import ROOT
from tests.engine.support.adapted import small_checkpoint
from tests.engine.support.gguf_files import wide_gguf_file
from tests.engine.support.packed_models import published
from tests.export.support.planning import SHAPES, cpu

CPU = cpu(20_000)


def _judge(directory: Path, machine: Any = CPU) -> str:
    files = {"model.safetensors": ModelFile(bytes=1, sha256="0" * 64)}
    return judge(ModelManifest(pulled=now(), format="safetensors", files=files), directory, machine)


@pytest.mark.parametrize(
    ("find", "said"),
    [
        (lambda: published("awq").directory, "tokens/s alone"),
        (lambda: published("nvfp4").directory, "speed is not predicted: PyTorch computes this model's steps"),
        (lambda: small_checkpoint("gpt2"), "tokens/s alone"),
        (lambda: SHAPES / "llama-3.1-8b", "tokens/s alone"),
    ],
    ids=["awq", "nvfp4", "transformers", "llama"],
)
def test_what_fits(find: Callable[[], Path], said: str) -> None:
    found = _judge(find())
    assert found.startswith("fits: ")
    assert said in found


def test_only_what_is_too_large_is_said_to_be(tmp_path: Path) -> None:
    assert _judge(SHAPES / "llama-3.1-70b").startswith("too large: 131.4 GiB of weights")
    config = json.loads((SHAPES / "llama-3.1-8b/config.json").read_text())
    described = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    assert _judge(tmp_path, find_gpu("a100-80")).startswith("not planned: precision FP8: a100-80 has compute")
    assert _judge(tmp_path, "no GPU of the table") == "not planned: no GPU of the table"


def test_a_gguf_file_in_blocks_is_compared_with_the_memory_of_what_computes() -> None:
    path = wide_gguf_file("Q8_0").path
    manifest = ModelManifest(pulled=now(), format="gguf", files={path.name: ModelFile(bytes=1, sha256="0" * 64)})
    h100 = find_gpu("h100")
    tiny = h100.model_copy(update={"memory_mib": 0.5})
    assert re.fullmatch(
        r"fits: .* of weights, .* of memory free; speed is not planned \(GGUF\)", judge(manifest, path.parent, CPU)
    )
    assert f"of weights, {in_units(h100.memory_bytes)} on h100" in judge(manifest, path.parent, h100)
    assert judge(manifest, path.parent, tiny).startswith("too large: ")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method is 'bitsandbytes'; it must"),
        ({"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}, "neither Inflight nor transformers has"),
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon", "head_dim": None}, "it has attention of"),
        ({"architectures": ["PhiForCausalLM"], "model_type": "phi", "quantization_config": {"quant_method": "awq"}},
         "quantization_config ('awq') is not supported with transformers' code"),
    ],
    ids=["format", "unknown", "attention", "quantized"],
)  # fmt: skip
def test_what_is_not_served_is_said_by_name(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = json.loads((ROOT / "deployments/demo/model/config.json").read_text())
    kept = {name: value for name, value in (config | fields).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    found = _judge(tmp_path)
    assert found.startswith("not served: ")
    assert said in found


def test_without_pytorch_the_others_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "inflight.export.plan.stored", raising=False)
    assert _judge(published("awq").directory).startswith("not planned: torch is not installed; it comes with: ")


def test_what_a_configuration_says_is_no_command_to_a_terminal(tmp_path: Path) -> None:
    config = json.loads((SHAPES / "llama-3.1-8b/config.json").read_text())
    described = {"quant_method": "awq", "version": "gemv[/b]\x1b[2j"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    assert "version is 'gemv[/b]\\x1b[2j'" in _judge(tmp_path)
