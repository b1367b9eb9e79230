"""What one look counts: batch, queue and cache, from the engine's snapshot or, without it, from the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.engine.snapshot import CacheState, Snapshot
from inflight.errors import InflightError
from inflight.metrics import FAMILIES
from inflight.observe.page import Page
from inflight.observe.source import Look


@dataclass(frozen=True, slots=True)
class Counts:
    """Batch, queue and cache, from the snapshot or, without it, from the metrics. None: neither tells."""

    running: float | None
    max_running: float | None
    waiting: float | None
    max_waiting: float | None
    cache: CacheState | None


def counts(look: Look) -> Counts:
    """Return what a look counts."""
    if isinstance(look.snapshot, Snapshot):
        shot = look.snapshot
        return Counts(shot.running, shot.max_batch_size, shot.waiting, shot.max_queue_size, shot.kv_cache)
    page = look.page
    if not isinstance(page, Page):
        return Counts(None, None, None, None, None)
    names = ("running_requests", "batch_size_limit", "waiting_requests", "queue_limit")
    running, max_running, waiting, limit = (page.value(FAMILIES[f"inflight_{name}"].name) for name in names)
    return Counts(running, max_running, waiting, limit, _cache_of(page))


def _cache_of(page: Page) -> CacheState | None:
    family = FAMILIES["inflight_kv_cache_blocks"].name
    used, cached, free = (page.value(family, state=state) for state in ("used", "cached", "free"))
    if used is None or free is None:
        return None
    size = page.value(FAMILIES["inflight_kv_cache_block_tokens"].name) or 0
    kept = None if cached is None else int(cached)
    return CacheState(int(used + (cached or 0) + free), int(size), int(used), kept, int(free), stride=1, runs=())


def missing(look: Look) -> list[str]:
    """Say what a look lacks, and why."""
    notes = []
    if isinstance(look.snapshot, InflightError):
        notes.append(f"no requests and no block map: {look.snapshot}")
    if isinstance(look.page, InflightError):
        notes.append(f"no rates and no latencies: {look.page}")
    return notes
