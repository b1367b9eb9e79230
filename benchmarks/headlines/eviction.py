"""Eviction policies: which share of the prompts' tokens is found in the cache, over the size of the cache.

Only the cache's books are run, no model: what is evicted does not depend on what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.checkpoints import VOCAB
from benchmarks.figures import columns, curves, level, panels
from benchmarks.result import Result, Row
from benchmarks.setting import Setting
from inflight.engine.kvcache.eviction import POLICIES
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.load.lengths import rank_weights

_BLOCK = 16
_HEADS, _DOCUMENTS = 40, 25
"""System prompts, and documents that are asked about behind each of them."""
_HEAD, _DOCUMENT, _QUESTION, _SCAN = 128, 192, 32, 512
"""Tokens of each part, and of a prompt that comes once."""
_SKEW = 1.1
_SCANS = 0.2
"""Share of the requests that come once."""
_TRACES = ("steady", "drifting")
_CHANGES = 5
"""How often all that is popular is replaced, in the drifting trace."""
_UNLIMITED = 2**20


def eviction(setting: Setting) -> Result:
    """Serve a skewed trace from caches of several sizes; what is popular stays so, or changes now and then."""
    count = setting.pick(6000, 600)
    rows: list[Row] = []
    bounds = {}
    for name in _TRACES:
        trace = list(_trace(count, drifting=name == "drifting"))
        bounds[name] = _hit_rate(trace, _UNLIMITED, "lru")
        for blocks in setting.pick((256, 512, 1024, 2048, 4096, 8192), (64, 512)):
            setting.say(f"eviction: {name} trace, {blocks * _BLOCK:,} tokens")
            rows += [
                {
                    "kind": f"{name}, {policy}",
                    "cache_tokens": blocks * _BLOCK,
                    "hit_%": round(_hit_rate(trace, blocks, policy), 1),
                    "unlimited_cache_%": round(bounds[name], 1),
                }
                for policy in POLICIES
            ]
    figure, axes = panels(2)
    for one, name in zip(axes, _TRACES, strict=True):
        lines = {policy: columns(rows, "cache_tokens", "hit_%", f"{name}, {policy}") for policy in POLICIES}
        curves(one, lines, f"cache, tokens ({name} trace)", "prompt tokens found, %", log_x=True)
        level(one, bounds[name], "unlimited", len(POLICIES) - 1)
        one.tick_params(axis="x", labelsize=8)
    return Result("eviction", "Eviction policies", _finding(rows), rows, figure)


def _trace(count: int, drifting: bool) -> Iterator[list[int]]:
    """Yield prompts: a popular head, a popular document behind it, a question; now and then one that comes once.

    Args:
        count: how many.
        drifting: whether new heads and documents take the place of all the old ones, ``_CHANGES`` times.
    """
    generator = np.random.default_rng(0)
    head_weights, document_weights = rank_weights(_HEADS, _SKEW), rank_weights(_DOCUMENTS, _SKEW)
    heads, documents = _contents(generator)
    for number in range(count):
        if drifting and number and number % (count // (_CHANGES + 1)) == 0:
            heads, documents = _contents(generator)
        if generator.random() < _SCANS:
            yield generator.integers(1, VOCAB, _SCAN).tolist()
            continue
        head = generator.choice(_HEADS, p=head_weights)
        document = generator.choice(_DOCUMENTS, p=document_weights)
        question = generator.integers(1, VOCAB, _QUESTION)
        yield np.concatenate([heads[head], documents[head, document], question]).tolist()


def _contents(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all heads, and of all documents behind each."""
    heads = generator.integers(1, VOCAB, (_HEADS, _HEAD))
    return heads, generator.integers(1, VOCAB, (_HEADS, _DOCUMENTS, _DOCUMENT))


def _hit_rate(trace: Sequence[Sequence[int]], blocks: int, policy: str) -> float:
    """Return the share of the trace's tokens that the cache had, in percent; requests come one after the other."""
    cache, found = KvCacheManager(min(blocks, _UNLIMITED), _BLOCK, eviction=policy), 0
    for tokens in trace:
        table = cache.allocate(tokens, len(tokens))
        assert table is not None, "a prompt is larger than the cache"
        found += table.cached_tokens
        cache.grow(table, len(tokens))
        cache.take_copies()
        cache.commit(table, tokens, len(tokens))
        cache.free(table)
    return 100 * found / sum(map(len, trace))


def _finding(rows: Sequence[Row]) -> str:
    sizes = sorted({int(row["cache_tokens"]) for row in rows})
    middle = sizes[len(sizes) // 2]
    by = {str(row["kind"]): float(row["hit_%"]) for row in rows if row["cache_tokens"] == middle}
    most = [
        float(row["hit_%"])
        for row in rows
        if row["cache_tokens"] == sizes[-1] and str(row["kind"]).startswith(_TRACES[0])
    ]

    def listed(name: str) -> str:
        return ", ".join(f"{by[f'{name}, {policy}']} % ({policy})" for policy in POLICIES)

    best = {name: max(POLICIES, key=lambda policy: by[f"{name}, {policy}"]) for name in _TRACES}
    return (
        f"With room for {middle:,} tokens, a skewed trace with {_SCANS:.0%} of requests that come once finds of its "
        f"prompt tokens {listed('steady')}. Where all that is popular is replaced by something new, {_CHANGES} times, "
        f"it is {listed('drifting')}. The best is {best['steady']} in the one and {best['drifting']} in the other: a "
        "count of uses keeps what is popular from what comes once, and keeps it still when nobody asks for it any "
        "more. The choice stops mattering where all that is popular fits: with room for "
        f"{sizes[-1]:,} tokens the policies are between {min(most)} and {max(most)} % on the steady trace."
    )
