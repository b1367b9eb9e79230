"""A build computes in the type in which this machine is quick, and writes in the checkpoint's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from inflight.errors import DeploymentError
from inflight.export.data import Example
from inflight.export.quantize import modelopt
from inflight.export.quantize.modelopt import PROBE_TOKENS, QuantizedModel, Recipe, joined, measure_sensitivity
from inflight.export.stages import Journal
from tests.engine.support.checkpoints import make_checkpoint

ROWS = [Example((), tuple(range(1 + place, 40 + 2 * place)), chat=False) for place in range(4)]


def silent(*_: object) -> None:
    """Show no progress."""


@pytest.mark.proof
@pytest.mark.parametrize("quick", [False, True])
def test_a_checkpoint_in_bfloat16_is_written_so_whatever_it_is_computed_in(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelopt, "has_bfloat16", lambda: quick)
    source = tmp_path / "source"
    whole = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama", "Llama", {}), dtype=torch.bfloat16)
    whole.save_pretrained(source)
    model = QuantizedModel(source, Recipe("int8", fp8_kv_cache=False), ROWS, "cpu", silent)
    assert next(model.model.parameters()).dtype == (torch.bfloat16 if quick else torch.float32)
    model.save(tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8
    assert {tensor.dtype for name, tensor in tensors.items() if name.endswith("weight_scale")} == {torch.float32}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_rows_are_joined_up_to_512_tokens_and_none_is_lost() -> None:
    rows = [Example((), tuple(range(length)), chat=False) for length in (200, 300, 12, 1, 600, 5)]
    found = joined(rows)
    assert [len(one) for one in found] == [512, 1, 600, 5]
    assert [token for one in found for token in one] == [token for row in rows for token in row.tokens]


def test_one_row_cannot_both_calibrate_and_be_measured(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="--kl-budget needs two calibration rows at least"):
        measure_sensitivity(tmp_path, Recipe("int8", fp8_kv_cache=False), ROWS[:1], "cpu", silent, Journal())


@pytest.mark.proof
def test_the_rows_that_are_measured_do_not_calibrate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calibrated, measured = list[Example](), list[torch.Tensor]()
    make, logits = QuantizedModel.__init__, QuantizedModel.logits

    def noting(self: QuantizedModel, checkpoint: Path, recipe: Recipe, examples: list[Example], *rest: object) -> None:
        calibrated.extend(examples)
        make(self, checkpoint, recipe, examples, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(QuantizedModel, "__init__", noting)
    monkeypatch.setattr(QuantizedModel, "logits", lambda self, rows: (measured.append(rows), logits(self, rows))[1])
    checkpoint, recipe = make_checkpoint("llama", "Llama", {}), Recipe("fp8", fp8_kv_cache=False)
    found = measure_sensitivity(checkpoint, recipe, ROWS, "cpu", silent, Journal(tmp_path / "journal"))
    assert found[0].kl_divergence > 0
    assert len(calibrated) == 2
    shown = [row.tokens[:PROBE_TOKENS] for row in calibrated]
    assert not any(row[: len(one)].tolist() == one for rows in measured for row in rows for one in shown)
    asked = len(measured)
    again = measure_sensitivity(checkpoint, recipe, ROWS, "cpu", silent, Journal(tmp_path / "journal"))
    assert again == found
    assert len(measured) - asked == 1, "only the original is computed again; the groups are in the journal"


@pytest.mark.proof
def test_rows_of_other_lengths_are_measured_as_if_alone(tmp_path: Path) -> None:
    rows = [Example((), tuple(range(5, 5 + length)), False) for length in (40, 40, 12, 12)]
    checkpoint, recipe = make_checkpoint("llama", "Llama", {}), Recipe("int8", fp8_kv_cache=False)

    def losses(rows: list[Example]) -> dict[tuple[str, ...], float]:
        found = measure_sensitivity(checkpoint, recipe, rows, "cpu", silent, Journal())
        return {one.linears: one.kl_divergence for one in found}

    together, long, short = losses(rows), losses(rows[:2]), losses(rows[2:])
    for group, loss in together.items():
        assert loss == pytest.approx((40 * long[group] + 12 * short[group]) / 52, rel=1e-2)
