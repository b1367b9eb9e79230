"""The soak: it finds what it looks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.setting import Setting
from benchmarks.soak import Soaked, soak, soak_result
from inflight.engine.kvcache.manager import BlockTable, KvCacheManager


def _soaked(bytes_per_request: float) -> Soaked:
    requests = np.arange(1, 401) * 250
    noise = np.random.default_rng(0).normal(0, 20_000, 400)
    resident = (4e8 + bytes_per_request * requests + noise).astype(int)
    return Soaked(requests.tolist(), resident.tolist(), 100.0, 1, 1, 1)


def test_every_request_ends_and_the_engine_is_idle_between_waves(setting: Setting) -> None:
    soaked = soak(setting, 300)
    assert soaked.requests[-1] == 300
    assert len(soaked.requests) == len(soaked.resident) > 4
    assert soaked.evictions > 0
    assert soaked.cancelled > 0


def test_growth_is_found_with_its_interval() -> None:
    slope, low, high = _soaked(100).growth()
    assert low < 100 < high
    assert high - low < 10
    assert slope == pytest.approx(100, abs=5)


@pytest.mark.parametrize(("bytes_per_request", "flat"), [(0, True), (100, False)])
def test_flat_is_what_rules_growth_out(bytes_per_request: float, flat: bool) -> None:
    result, held = soak_result(_soaked(bytes_per_request))
    assert held is flat
    assert result.rows[0]["flat"] == ("yes" if flat else "no")


def test_memory_that_jumps_once_has_a_wide_interval() -> None:
    jump = _soaked(0)
    resident = [size + 2_000_000 * (place > 250) for place, size in enumerate(jump.resident)]
    _, low, high = Soaked(jump.requests, resident, 1.0, 0, 0, 0).growth()
    assert high - low > 10


def test_a_lost_block_ends_it_with_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = KvCacheManager.free
    count = 0

    def lose_one(cache: KvCacheManager, table: BlockTable) -> None:
        nonlocal count
        if table.blocks:
            count += 1
            if count == 20:
                table.blocks.pop()
        free(cache, table)

    monkeypatch.setattr(KvCacheManager, "free", lose_one)
    done = CliRunner().invoke(bench, ["soak", "--requests", "100", "--checkpoints", str(folder)])
    assert done.exit_code == 1
    assert "idle, yet 1 blocks are used" in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_memory_that_grows_is_a_line_and_ends_with_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.soak.soak", lambda *_: _soaked(100))
    done = CliRunner().invoke(bench, ["soak", "--checkpoints", str(folder)])
    assert done.exit_code == 1
    assert "inflight: memory grows, or too few requests were sent" in " ".join(done.output.split())
