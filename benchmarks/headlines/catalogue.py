"""The headlines, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.headlines.batching import batching
from benchmarks.headlines.chunking import chunking
from benchmarks.headlines.drafters import drafters
from benchmarks.headlines.eviction import eviction
from benchmarks.headlines.fairness import fairness
from benchmarks.headlines.kv_types import kv_types
from benchmarks.headlines.offload import offload
from benchmarks.headlines.paging import paging
from benchmarks.headlines.prefix import prefix
from benchmarks.headlines.priorities import priorities
from benchmarks.headlines.speculation import speculation
from benchmarks.headlines.weights import weights
from benchmarks.result import Result
from benchmarks.setting import Setting

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
