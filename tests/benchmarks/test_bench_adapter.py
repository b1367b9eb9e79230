"""The adapter's command: what it makes of the figures, and that all three steps run."""

from __future__ import annotations

import pytest

from benchmarks.adapter import _STEPS, _result, adapter_speed
from benchmarks.setting import Setting


def test_shares_are_of_the_processors_time() -> None:
    times = dict(zip(_STEPS, (2.0, 4.0, 5.0), strict=True))
    loads = ("decode, 1 stream", "decode, 8 streams", "prefill, 512 tokens")
    rounds = [
        {
            name: {load: {"tokens/s": 10.0 * slow, "CPU ms per token": slow * cpu} for load in loads}
            for name, cpu in times.items()
        }
        for slow in (1.0, 3.0)
    ]
    result = _result(rounds, "a Llama", 0.25)
    assert [row["share of the native step"] for row in result.rows[:3]] == [1, 0.5, 0.4]
    assert "decode, 8 streams: 0.40 (0.80)" in result.finding
    assert result.caveat == "Others took 25 % of the processors meanwhile, which wall clocks show."


@pytest.mark.proof
def test_all_three_steps_run(setting: Setting) -> None:
    result = adapter_speed(setting, 1)
    assert {row["step"] for row in result.rows} == set(_STEPS)
    assert all(float(row["tokens/s"]) > 0 for row in result.rows)
