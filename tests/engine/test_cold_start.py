"""The start of an engine: what it loads, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.engine.shards import Shards
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import checkpoint

_START = """
import sys
from pathlib import Path
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
Engine.load(EngineConfig(Path(sys.argv[1]), device="cpu")).warm_up()
print(*(name for name in ("torch._dynamo", "sympy", "triton", "transformers") if name in sys.modules))
"""


@pytest.mark.proof
def test_nothing_is_imported_that_is_not_needed() -> None:
    """PyTorch's compiler takes longer to import than a small checkpoint to load, and some ways of loading need it."""
    done = subprocess.run(
        [sys.executable, "-c", _START, str(checkpoint("llama"))], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def _in_shards(directory: Path, count: int) -> dict[str, torch.Tensor]:
    tensors = load_file(checkpoint("llama") / "model.safetensors")
    places = {name: f"model-{number % count}.safetensors" for number, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return tensors


def test_every_tensor_is_loaded_once(tmp_path: Path) -> None:
    expected = _in_shards(tmp_path, 3)
    shards, seen = Shards(tmp_path), []
    loaded: dict[str, torch.Tensor] = {}
    shards.load(expected.keys(), lambda name, tensor: (seen.append(name), loaded.update({name: tensor.clone()})))
    assert sorted(seen) == sorted(expected)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    _in_shards(tmp_path, 2)
    seen: list[str] = []
    Shards(tmp_path).load({"lm_head.weight"}, lambda name, _: seen.append(name))
    assert seen == ["lm_head.weight"]


def test_what_goes_wrong_in_a_thread_is_raised(tmp_path: Path) -> None:
    expected = _in_shards(tmp_path, 2)
    shards = Shards(tmp_path)

    def refuse(name: str, _: torch.Tensor) -> None:
        if name == "lm_head.weight":
            raise DeploymentError(f"checkpoint: tensor {name} is refused")

    with pytest.raises(DeploymentError, match="tensor lm_head.weight is refused"):
        shards.load(expected.keys(), refuse)
    broken = next(tmp_path.glob("*.safetensors"))
    broken.write_bytes(broken.read_bytes()[:-8])
    with pytest.raises(DeploymentError, match=f"{broken.name}: cannot be read"):
        shards.load(expected.keys(), lambda name, tensor: None)
