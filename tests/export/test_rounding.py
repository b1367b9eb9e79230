"""INT8 by groups: what is written is what the engine reads, each weight within half a step of the original's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError
from inflight.export.checkpoint import inspect
from inflight.export.quantize.modelopt import Recipe
from inflight.export.quantize.rounding import pack, round_checkpoint
from tests.export.support.tiny import make_checkpoint
from tests.support.progress import silent

KEPT = "model.layers.1.mlp.down_proj"
RECIPE = Recipe("int8", fp8_kv_cache=False, keep=(KEPT,), group=64)


@pytest.mark.parametrize("group", [16, 64])
def test_words_hold_the_nearest_step_of_each_group(group: int) -> None:
    weight = torch.randn(6, 192, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 2, 6)[:, None]
    weight[2, :group] = 0.0
    packed = pack(weight, group)
    assert packed["weight_shape"].tolist() == [6, 192]
    codes = packed["weight_packed"].numpy().view(np.uint8).astype(np.int64).reshape(6, 192) - 128
    scales = packed["weight_scale"].float().numpy().repeat(group, 1)
    assert np.abs(codes).max() == 127
    assert not codes[2, :group].any()
    off = np.abs(codes * scales - weight.numpy())
    # Half a step, or at a group's end as much as its scale was rounded down to bfloat16.
    assert (off <= scales * 0.5 + np.abs(weight.numpy()) * 2**-8).all()


@pytest.mark.parametrize("shards", [False, True])
def test_the_engine_reads_what_is_written(shards: bool, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", shards=shards)
    (tmp_path / "out").mkdir()
    round_checkpoint(inspect(source), RECIPE, tmp_path / "out", silent)
    original, rounded = Scorer(source, "float32", device="cpu"), Scorer(tmp_path / "out", "float32", device="cpu")
    assert rounded.scheme == "W8A16_GROUPS"
    described = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert described["ignore"] == ["lm_head", KEPT], "other readers want every linear in one of the two lists"
    assert KEPT not in described["config_groups"]["group_0"]["targets"]
    for name, linear in rounded.linears.items():
        off = (rounded.weight(name) - original.weight(name)).norm() / original.weight(name).norm()
        assert isinstance(linear, nn.Linear) == (name in (KEPT, "lm_head")), name
        assert off == 0 if isinstance(linear, nn.Linear) else 0 < off < 0.01


def test_a_backbones_names_lack_the_prefix(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({name.removeprefix("model."): one for name, one in tensors.items()}, source / "model.safetensors")
    (tmp_path / "out").mkdir()
    round_checkpoint(inspect(source), RECIPE, tmp_path / "out", silent)
    written = load_file(tmp_path / "out/model.safetensors")
    assert "layers.0.mlp.up_proj.weight_packed" in written
    assert KEPT.removeprefix("model.") + ".weight" in written


def test_a_weight_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.0.self_attn.o_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    (tmp_path / "out").mkdir()
    with pytest.raises(DeploymentError, match=r"no file has model\.layers\.0\.self_attn\.o_proj\.weight"):
        round_checkpoint(inspect(source), RECIPE, tmp_path / "out", silent)
