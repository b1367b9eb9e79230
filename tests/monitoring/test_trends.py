"""Alerts that compare with an hour ago, proven by faults: an hour is a minute here.

Latencies are those of an engine that only waits. They double for an alert; here they grow twentyfold, which is far more
than a machine that is slow or stands still for a second adds to their means.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from monitoring.generate.rule import HOUR, MINUTE, Timescale
from monitoring.generate.saturation import WORTHWHILE_HIT_RATIO
from tests.monitoring.support.stack import ROOM_S, Stack, load, stack, wait_for

pytestmark = [
    pytest.mark.proof(waits=True),
    pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed"),
]

SCALE = 60
PAUSE_S = 0.5
"""After each round of a load: others need the cores."""
FAST: dict[str, object] = {"kind": "replay", "replay_prefill_ms": 30, "replay_step_ms": 10}
SLOW = FAST | {"replay_prefill_ms": 600, "replay_step_ms": 200}
SHARED = "Every one of these prompts begins with the same words, which the cache has, and ends with what is its own: "


def test_an_engine_that_is_slow_since_it_was_started_anew(tmp_path: Path) -> None:
    with stack(tmp_path, SCALE, engine=FAST) as running:
        with _load(running, "{}"):
            means = (f"instance:inflight_{name}_seconds:mean_5m > 0" for name in ("time_to_first_token", "inter_token"))
            _wait_until_known_for(running, HOUR, " and ".join(means))
        running.restart(engine=SLOW)
        with _load(running, "{}"):
            running.wait_firing("InflightTtftRising", HOUR)
            running.wait_firing("InflightItlRising", HOUR)


def test_prompts_that_share_nothing_any_more(tmp_path: Path) -> None:
    with stack(tmp_path, SCALE) as running:
        with _load(running, SHARED + "{}"):
            ratio = "instance:inflight_prefix_hit:ratio_rate30m"
            _wait_until_known_for(running, 30 * MINUTE, f"{ratio} > {WORTHWHILE_HIT_RATIO}")
        with _load(running, "{} is how this one begins, unlike all of those that were before it and come behind it."):
            running.wait_firing("InflightPrefixHitRateDropped", 2 * HOUR)


def _wait_until_known_for(running: Stack, seconds: float, condition: str) -> None:
    """Wait until a condition on a recorded series held so many committed seconds ago."""
    since, within_s = time.time(), Timescale(SCALE).seconds(seconds) + ROOM_S

    def held() -> bool:
        at = time.time() - Timescale(SCALE).seconds(seconds)
        return at >= since and bool(running.prometheus.instant(condition, at))

    wait_for(held, within_s, f"{condition} was never true {seconds} committed seconds ago, within {within_s:g} s")


@contextmanager
def _load(running: Stack, prompt: str) -> Iterator[None]:
    """Keep eight short requests running, each with a prompt of its own."""
    numbers = itertools.count(int(time.time()))
    with ExitStack() as loads:
        for _ in range(8):
            loads.enter_context(load(running, 1, 4, lambda: prompt.format(next(numbers)), PAUSE_S))
        yield
