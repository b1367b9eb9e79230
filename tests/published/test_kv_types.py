"""A KV cache in fewer bits costs little on prose, beside one in float32."""

from __future__ import annotations

import pytest

from benchmarks.environments import Home
from benchmarks.published.fetched import model_path
from benchmarks.published.perplexity import KvType, perplexity, pieces, scores
from inflight.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]

LOSSES: dict[str, dict[KvType, float]] = {
    "smollm2": {"bfloat16": 0.001, "int8": 0.002, "fp8": 0.025},
    "gemma3": {"bfloat16": 0.001, "int8": 0.01, "fp8": 0.01},
}
"""The most that a type may add to the perplexity, as a share."""


@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.release)])
def test_perplexity(home: Home, name: str) -> None:
    path = model_path(home, name)
    prompts = pieces(Tokenizer.from_checkpoint(path), 3)
    exact = perplexity(scores(path, "float32", prompts))
    losses = {kv_type: perplexity(scores(path, kv_type, prompts)) / exact - 1 for kv_type in LOSSES[name]}
    assert not {kv_type: loss for kv_type, loss in losses.items() if abs(loss) > LOSSES[name][kv_type]}
