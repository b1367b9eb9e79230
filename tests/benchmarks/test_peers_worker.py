"""Our own worker, as it is started: the checkpoint that it prepares, its speed, and its log-probs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.contenders import Place
from benchmarks.peers.quality import MODEL
from benchmarks.peers.variants import GRID, OURS, Variant

VARIANTS = [one for one in GRID if one.contender == OURS and one.name in ("bfloat16", "INT4, lm_head INT8")]
PROMPT = list(range(100, 140))


@pytest.mark.proof
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda one: one.name)
def test_our_worker_does_every_job(variant: Variant, tmp_path: Path) -> None:
    place = Place(tmp_path, timeout_s=300)
    model = place.converted(variant, MODEL)
    assert (model / "hf_quant_config.json").exists() == ("precision" in variant.settings)
    worker = place.worker(OURS, measures=True)
    job = {"model": str(model.resolve()), "settings": dict(variant.settings), "threads": 1}
    cells = [{"streams": 2, "prompt": 20, "output": 4}]
    [figures] = worker.do(job | {"action": "speed", "cells": cells, "times": 2, "seed": 0}, 300)["cells"]
    assert min(figures.values()) > 0
    worker.do(job | {"action": "quality", "prompts": [PROMPT], "output": str(tmp_path / "found.npy")}, 300)
    found = np.load(tmp_path / "found.npy")
    assert found.shape[0] == len(PROMPT)
    assert np.exp(found).sum(axis=1) == pytest.approx(1, abs=1e-3)
