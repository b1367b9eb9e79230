"""gpt-oss with its experts in MXFP4: they stay packed, and compute what the decoded weights compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from inflight.engine.quant.linears import Mxfp4Linear
from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import PROMPTS
from tests.engine.support.driving import ask, load, run
from tests.engine.support.mxfp4 import Change, packed_gpt_oss


@pytest.mark.proof
def test_tokens_and_scores_are_those_of_the_decoded_weights(tmp_path: Path) -> None:
    model = packed_gpt_oss(tmp_path / "model")
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


def test_experts_staypacked_gpt_oss(tmp_path: Path) -> None:
    packed_gpt_oss(tmp_path / "model")
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
    packed_gpt_oss(tmp_path / "model", change)
    with pytest.raises(DeploymentError, match=words):
        load(tmp_path / "model", cpu_step="pytorch")


def test_experts_that_are_not_packed_are_refused(tmp_path: Path) -> None:
    packed_gpt_oss(tmp_path / "model", modules_to_not_convert=["model.layers.0.mlp.experts"])
    with pytest.raises(DeploymentError, match="modules_to_not_convert is .*a list without experts"):
        load(tmp_path / "model", cpu_step="pytorch")
