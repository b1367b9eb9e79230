"""The headlines, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable

from inflight.bench.headlines.batching import batching
from inflight.bench.headlines.chunking import chunking
from inflight.bench.headlines.drafters import drafters
from inflight.bench.headlines.eviction import eviction
from inflight.bench.headlines.fairness import fairness
from inflight.bench.headlines.kv_types import kv_types
from inflight.bench.headlines.offload import offload
from inflight.bench.headlines.paging import paging
from inflight.bench.headlines.prefix import prefix
from inflight.bench.headlines.priorities import priorities
from inflight.bench.headlines.speculation import speculation
from inflight.bench.headlines.weights import weights
from inflight.bench.result import Result
from inflight.bench.setting import Setting

HEADLINES: dict[str, Callable[[Setting], Result]] = {
    "batching": batching,
    "paging": paging,
    "prefix": prefix,
    "chunking": chunking,
    "kv-types": kv_types,
    "weights": weights,
    "speculation": speculation,
    "drafters": drafters,
    "offload": offload,
    "eviction": eviction,
    "priorities": priorities,
    "fairness": fairness,
}
"""Each makes one result, of its name."""
