"""Builds of published models begin with the checkpoint that a GGUF file stands for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.published.texts import held_out
from benchmarks.published.unquantized import write_checkpoint
from inflight.engine.scoring import Scorer
from inflight.export.checkpoint import inspect
from tests.engine.support.checkpoints import TOKENS
from tests.engine.support.gguf_files import wide_gguf_file


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_files_weights_are_a_checkpoint_in_bfloat16(tied: bool, tmp_path: Path) -> None:
    file = wide_gguf_file("Q4_K", tied=tied)
    write_checkpoint(file.path, tmp_path / "made")
    assert inspect(tmp_path / "made").config.tie_word_embeddings == tied
    assert json.loads((tmp_path / "made/config.json").read_text())["dtype"] == "bfloat16"
    made, stored = (Scorer(path, "float32", device="cpu") for path in (tmp_path / "made", file.path))
    assert made.linears.keys() == stored.linears.keys()
    for name in made.linears:
        assert torch.equal(made.weight(name), stored.weight(name).to(torch.bfloat16).float())
    torch.testing.assert_close(made.logits(TOKENS), stored.logits(TOKENS), atol=0.1, rtol=0.1)


def test_the_prose_is_pages_and_not_what_the_demo_has_learnt() -> None:
    rows = held_out().split("\n\n")
    assert len(held_out().split()) > 10_000
    assert "BF16, bfloat16, is a floating-point number" not in held_out()
    assert len(rows) > 100
