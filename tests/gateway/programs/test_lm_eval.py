"""lm-eval's scores through the gateway are those of transformers on the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.clients import LM_EVAL
from benchmarks.gateway.lm_eval import GENERATION, ROLLING, differences, on_both
from benchmarks.gateway.served import Served
from inflight.resources import DEMO
from tests.gateway.programs.conftest import environment

pytestmark = [pytest.mark.programs, pytest.mark.timeout(900)]

DOCUMENTS = 12
ROUNDING = 2e-6
"""Of a log-likelihood: both compute in float32, and add in another order."""


@pytest.mark.release
def test_scores_are_those_of_transformers(demo_gateway: Served, tmp_path: Path) -> None:
    environment(LM_EVAL)
    theirs, ours = on_both(demo_gateway, DEMO / "model", tmp_path, DOCUMENTS)
    rows = list(differences(theirs, ours))
    assert {row["metric"] for row in rows} >= {"acc", "acc_norm", "word_perplexity", "exact_match"}
    for row in rows:
        limit = 0 if row["task"] == GENERATION else ROUNDING
        assert float(row["largest_difference"]) <= limit, row
        if row["task"] == ROLLING:
            assert row["gateway"] == pytest.approx(row["transformers"], rel=1e-4)
        else:
            assert row["gateway"] == row["transformers"], row
    assert any(ours.samples[GENERATION]), "no text was generated"
