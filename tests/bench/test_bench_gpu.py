"""The GPU's bench, on the CPU and small: that all of it works; and the checkpoints that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from inflight.bench.checkpoints import SMALL
from inflight.bench.gpu import FULL, QUICK, Bench, main, result_of
from inflight.bench.random_weights import random_checkpoint
from inflight.bench.result import write_result
from inflight.errors import InflightError

CPU = torch.device("cpu")


@pytest.mark.slow
def test_all_of_it_works(tmp_path: Path) -> None:
    rows = Bench(QUICK, tmp_path / "checkpoints", CPU).run()
    write_result(result_of(rows, QUICK, "a CPU"), tmp_path / "results", "make gpu-bench")
    record = json.loads((tmp_path / "results" / "speed.json").read_text())
    assert [row["measurement"] for row in record["rows"]] == [
        "decode, 1 stream, bf16",
        "decode, 1 stream, FP8",
        "decode, 3 streams, bf16",
        "decode, 3 streams, FP8",
        "prefill, 3 streams, bf16",
        "prefill, 3 streams, FP8",
    ]
    assert all(row["tokens_per_s"] > 0 and row["its_tokens_per_s"] > 0 for row in record["rows"])


def test_bytes_that_a_token_reads() -> None:
    # Llama 3.1 8B has 8.03e9 parameters; the embedding, 0.53e9 of them, is not read but for one row.
    read = Bench(FULL, Path(), CPU)._bytes_per_token(2)
    context = 32 * 2 * 2 * 1024 * (512 + 64)
    assert read - context == pytest.approx(2 * (8.03e9 - 0.525e9), rel=1e-3)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(InflightError, match="taken.*cannot be written"):
        random_checkpoint(SMALL, tmp_path / "taken", False, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        main(output=None, checkpoints=tmp_path, device="cuda", quick=True)
