"""Everything at once: under random schedules and settings, every request gets what it would get alone.

``HYPOTHESIS_PROFILE=soak pytest tests/engine/test_schedules.py`` runs thousands; a schedule that fails is made as small
as can be and printed as a script.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from tests.engine.support.native import CPU_STEPS
from tests.engine.support.schedules import Arrival, Schedule, schedules
from tests.support.properties import examples

SETTINGS = {
    "cpu_step": st.sampled_from(CPU_STEPS),
    ("block_size", "num_blocks"): st.sampled_from(((1, 96), (4, 30), (8, 18), (4, 64), (8, 64))),
    "prefix_reuse": st.booleans(),
    "eviction": st.sampled_from(("lru", "lfu", "prefix")),
    "offload_to": st.sampled_from(("none", "host", "file")),
    "offload_bytes": st.just(1 << 16),
    "offload_min_tokens": st.sampled_from((1, 12)),
    "max_batch_size": st.integers(3, 8),
    "max_tokens_per_step": st.integers(4, 48),
    "prefill_chunk_tokens": st.sampled_from((None, 3, 16)),
    "policy": st.sampled_from(("guaranteed_no_evict", "max_utilization")),
    "mode": st.sampled_from(("inflight", "inflight", "inflight", "dynamic", "static")),
    "max_queue_delay_ms": st.just(0.0),
    "fairness": st.sampled_from(("none", "client")),
    "speculation": st.sampled_from((None, ("ngram", 4, 1), ("draft_target", 3, 1), ("draft_target", 2, 3))),
}


def _crowd(more: dict[str, Any]) -> Schedule:
    """Return a schedule of which much is preempted and evicted: what is drawn is seldom so full."""
    arrivals = (Arrival(place % 4, place % 3, 40 - place, place % 2 * 60, 12, place % 2) for place in range(12))
    small = {"block_size": 4, "num_blocks": 30, "max_batch_size": 8, "max_tokens_per_step": 40}
    crowded = small | {"policy": "max_utilization", "speculation": ("ngram", 4, 1)}
    return Schedule("llama", crowded | more, tuple(arrivals))


HAPPENED = ("preemptions", "cached_tokens", "accepted_draft_tokens", "kv_cache_restored_tokens", "recomputed_tokens")


@pytest.mark.proof
@pytest.mark.property
def test_every_request_gets_what_it_would_get_alone() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=examples(0.3))
    @given(schedules(("llama", "gemma3", "mistral"), SETTINGS))
    @example(_crowd({"offload_to": "none"}))
    @example(_crowd({"offload_to": "host", "offload_bytes": 1 << 20, "offload_min_tokens": 1}))
    def check(schedule: Schedule) -> None:
        note(schedule.script())
        stats = schedule.run().stats
        seen.update({name: getattr(stats, name) for name in HAPPENED})

    check()
    assert min(seen[name] for name in HAPPENED) > 0, f"what it is for did not happen: {seen}"


def test_a_schedule_is_printed_as_a_script_that_runs_it() -> None:
    schedule = Schedule("llama", {"num_blocks": 60}, (Arrival(0, 1, 5, 60, 3), Arrival(1, 1, 5, 61, 3, 2, 4)))
    seen: dict[str, Schedule] = {}
    script = schedule.script().replace("\n\nSchedule(", "\n\nseen['it'] = Schedule(").replace(".run()", "")
    exec(script, {"seen": seen})
    assert seen["it"] == schedule
    assert seen["it"].run().stats.preemptions == 0
