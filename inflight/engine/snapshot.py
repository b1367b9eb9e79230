"""Snapshot: what an engine is doing between two steps, as ``inspect`` answers and ``inflight top`` shows it.

This module writes and reads its JSON; the clients read ``model`` from it too. A snapshot holds no text, no stream key
and no whole request id: whoever may look at a server must learn neither what others ask, nor the id with which ``stop``
would end their requests. It cannot protect requests whose ids can be guessed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from inflight.clock import now_ns
from inflight.errors import EngineFailure

if TYPE_CHECKING:
    from inflight.engine.kvcache.manager import KvCacheManager
    from inflight.engine.request import Request, RequestMetrics
    from inflight.engine.sequence import Sequence
    from inflight.engine.stats import EngineStats

MAX_REQUESTS = 200
"""The most requests that a snapshot describes; it counts all of them."""
MAX_CELLS = 2048
"""The most blocks whose state a snapshot has; of a larger cache it has every n-th, to take little of a step's time."""
SHOWN_CHARACTERS = 8
"""Characters of a request's id that it shows."""


@dataclass(frozen=True, slots=True)
class RequestState:
    """One sequence that waits or runs."""

    request_id: str
    """The client's id, as ``short_id`` shortens it; it may be empty."""
    state: Literal["waiting", "prefill", "decode"]
    priority: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    generated_tokens: int
    """With those that an earlier run has generated, where it is resumed."""
    max_tokens: int
    preemptions: int
    age_s: float
    """Since its arrival."""
    queue_s: float | None
    """From its arrival to its first step, or to now; None: the engine does not know."""
    tokens_per_second: float | None
    """Of the tokens after the first; None: there are none yet."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """The KV cache, in blocks."""

    num_blocks: int
    block_size: int
    """Tokens per block."""
    used: int
    cached: int | None
    """Without an owner, and kept for equal prefixes; None: counted among the free ones."""
    free: int
    stride: int
    """The map has every so many-th block, from the first on."""
    runs: tuple[tuple[str, int], ...]
    """The map, run-length encoded: ``used``, ``cached`` or ``free``, and how many in a row. Empty: not known."""

    def map(self) -> list[str]:
        """Return the state of each block on the map."""
        return [state for state, count in self.runs for _ in range(count)]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the model for clients; ``inflight.client.aio`` reads them by these names."""

    name: str
    max_sequence_length: int | None
    """Tokens of prompt and output together; None: the engine has no limit."""
    default_max_tokens: int
    """``max_tokens`` of a request that does not set it."""
    sampling_defaults: Mapping[str, float]
    """How the checkpoint's makers sample; empty: it does not say."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine at one moment."""

    max_batch_size: int
    steps: int
    """So far."""
    running: int
    waiting: int
    requests: tuple[RequestState, ...]
    """At most ``MAX_REQUESTS``: those that run, then those that wait, the oldest first."""
    kv_cache: CacheState | None
    """None: the engine has none."""
    engine: str = ""
    """``engine.kind`` of the deployment."""
    max_queue_size: int = 0
    model: ModelFacts | None = None

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """Read what ``to_json`` has written.

        Raises:
            EngineFailure: it was not, or by another version.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            cache = data["kv_cache"]
            if cache is not None:
                cache = CacheState(**cache | {"runs": tuple((state, count) for state, count in cache["runs"])})
            requests = tuple(RequestState(**request) for request in data["requests"])
            model = None if data["model"] is None else ModelFacts(**data["model"])
            return cls(**data | {"requests": requests, "kv_cache": cache, "model": model})
        except (ValueError, TypeError, KeyError) as error:
            raise EngineFailure(f"the snapshot cannot be read, the server may be of another version: {error}") from None


def short_id(request_id: str) -> str:
    """Return a short form of a request's id, by which its client knows it and with which nobody can end it.

    The first characters and an ellipsis; of an id that is no longer than those, ``#`` and the first characters of its
    SHA-256. An empty id stays empty.
    """
    if len(request_id) > SHOWN_CHARACTERS:
        return request_id[:SHOWN_CHARACTERS] + "…"
    return "#" + hashlib.sha256(request_id.encode()).hexdigest()[: SHOWN_CHARACTERS - 1] if request_id else ""


def describe(request: Request, metrics: RequestMetrics, waits: bool, now_ns: int) -> RequestState:
    """Return one sequence's state; ``waits``: it has no place in the batch."""
    begun, first = metrics.first_scheduled_ns, metrics.first_token_ns
    decode_s = (metrics.last_token_ns - first) / 1e9
    queue_end_ns = begun or (now_ns if waits else None)
    return RequestState(
        request_id=short_id(request.request_id),
        state="waiting" if waits else "decode" if first else "prefill",
        priority=request.priority,
        prompt_tokens=len(request.prompt),
        cached_tokens=metrics.cached_tokens,
        generated_tokens=metrics.resumed_tokens + metrics.generated_tokens,
        max_tokens=request.sampling.max_tokens,
        preemptions=metrics.preemptions,
        age_s=round((now_ns - request.arrival_ns) / 1e9, 4),
        queue_s=None if queue_end_ns is None else round((queue_end_ns - request.arrival_ns) / 1e9, 4),
        tokens_per_second=round((metrics.generated_tokens - 1) / decode_s, 2) if decode_s > 0 else None,
    )


def snapshot(
    stats: EngineStats, requests: Iterable[tuple[Request, RequestMetrics, bool]], kv_cache: CacheState | None
) -> Snapshot:
    """Return a snapshot; ``requests``: each with its metrics and whether it waits, in the order of arrival."""
    known = sorted(requests, key=lambda one: one[2])
    waiting, now = sum(waits for _, _, waits in known), now_ns()
    described = tuple(describe(*one, now) for one in known[:MAX_REQUESTS])
    return Snapshot(stats.batch_size_limit, stats.steps, len(known) - waiting, waiting, described, kv_cache)


def portable_snapshot(stats: EngineStats, sequences: Iterable[Sequence], cache: KvCacheManager) -> Snapshot:
    """Return the snapshot of the portable engine, from its stats, its sequences and its cache."""
    requests = [(sequence.request, sequence.metrics, sequence.table is None) for sequence in sequences]
    stride = max(1, -(-cache.num_blocks // MAX_CELLS))
    states = (cache.state(block) for block in range(0, cache.num_blocks, stride))
    state = CacheState(
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        used=cache.num_used_blocks,
        cached=cache.num_cached_blocks,
        free=cache.num_free_blocks,
        stride=stride,
        runs=tuple((state, len(list(group))) for state, group in itertools.groupby(states)),
    )
    return snapshot(stats, requests, state)


def counted_cache(stats: EngineStats) -> CacheState | None:
    """Return the state of a KV cache of which only the counts are known."""
    now = stats.state()
    total, used, cached = now.kv_blocks_max, now.kv_blocks_used, now.kv_blocks_cached
    return CacheState(total, now.tokens_per_block, used, cached, total - used - (cached or 0), 1, ()) if total else None
