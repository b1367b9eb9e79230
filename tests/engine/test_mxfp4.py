"""gpt-oss with its experts in MXFP4: they stay packed, and compute what the decoded weights compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.engine.quant.linears import Mxfp4Linear
from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import PROMPTS, checkpoint
from tests.engine.support.driving import ask, load, run

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


def _packed(directory: Path, change: Change = lambda tensors: None, **config: Any) -> Any:
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
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    data = json.loads((checkpoint("gpt-oss") / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(data | {"quantization_config": METHOD | config}))
    return model


def test_tokens_and_scores_are_those_of_the_decoded_weights(tmp_path: Path) -> None:
    model = _packed(tmp_path / "model")
    requests = [ask(prompt, 12) for prompt in PROMPTS[:8]]
    outputs = run(load(tmp_path / "model", cpu_step="pytorch"), requests)
    for request in requests:
        prompt = torch.tensor([request.prompt])
        with torch.inference_mode():
            made = model.generate(prompt, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert outputs[request.key].tokens == made[0, len(request.prompt) :].tolist()
    scorer = Scorer(tmp_path / "model", "float32", device="cpu")
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[3]])).logits[0]
    torch.testing.assert_close(scorer.logits(PROMPTS[3]), expected, atol=1e-4, rtol=1e-4)


def test_experts_stay_packed(tmp_path: Path) -> None:
    _packed(tmp_path / "model")
    scorer = Scorer(tmp_path / "model", "float32", device="cpu")
    packed = [linear for linear in scorer.linears.values() if isinstance(linear, Mxfp4Linear)]
    assert len(packed) == 3 * 6 * 2
    for linear in packed:
        rows, columns = linear.decode(torch.float32).shape
        assert linear.weight_bytes == rows * columns // 2 + rows * columns // 32


def _without_scales(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]


def _with_a_scale_that_is_no_number(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 0, 0] = 255


def _with_a_shorter_block(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][..., :8].contiguous()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_scales, "no tensor for model.layers.1.mlp.experts.down_proj_scales"),
        (_with_a_scale_that_is_no_number, "down_proj_scales has a scale that is not a number"),
        (_with_a_shorter_block, r"down_proj_blocks is \[6, 64, 3, 8\]; expected \[6, 64, 3, 16\]"),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, change: Change, words: str) -> None:
    _packed(tmp_path / "model", change)
    with pytest.raises(DeploymentError, match=words):
        load(tmp_path / "model", cpu_step="pytorch")


def test_experts_that_are_not_packed_are_refused(tmp_path: Path) -> None:
    _packed(tmp_path / "model", modules_to_not_convert=["model.layers.0.mlp.experts"])
    with pytest.raises(DeploymentError, match="modules_to_not_convert is .*a list without experts"):
        load(tmp_path / "model", cpu_step="pytorch")
