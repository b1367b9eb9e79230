"""Drives an engine, and a cache, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.kv_cache import BlockTable, KvCache
from inflight.engine.request import Output, Request
from inflight.sampling import SamplingParams
from inflight.text.tokenizer import Tokenizer
from inflight.triton.responses import join


def load(model: Path, tokenizer: Tokenizer | None = None, **settings: Any) -> Engine:
    """Return a small engine in float32 on the CPU."""
    small: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 256}
    return Engine.load(EngineConfig(model, **(small | settings)), tokenizer)


def ask(prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> Request:
    """Return a request; ids, priority and deadline are the request's, the rest is for sampling."""
    of_request = {
        name: more.pop(name) for name in ("priority", "deadline_ns", "request_id", "client_id") if name in more
    }
    return Request(list(prompt), SamplingParams(max_tokens, **more), **of_request)


def run(engine: Engine, requests: Sequence[Request]) -> dict[int, Output]:
    """Submit requests, step until all have ended, check that the cache is idle; return the joined outputs by key."""
    for request in requests:
        engine.validate(request)
        engine.submit(request)
    return finish(engine)


def finish(engine: Engine) -> dict[int, Output]:
    """Step until the engine is idle, and check that it is."""
    outputs: dict[int, Output] = {}
    while engine.busy:
        for output in engine.step():
            known = outputs.get(output.key)
            assert known is None or not known.finished, "an output came after the last one"
            outputs[output.key] = join(known, output)
    assert all(output.finished for output in outputs.values())
    assert_idle(engine)
    return outputs


def assert_idle(engine: Engine) -> None:
    """Check that no block is used or reserved."""
    cache = engine._cache
    cache.check()
    assert (cache.used_blocks, cache.reserved_blocks) == (0, 0)
    assert cache.free_blocks + cache.cached_blocks == cache.num_blocks


def fill(cache: KvCache, tokens: list[int]) -> BlockTable:
    """Open a sequence, compute all of it and commit it."""
    table = cache.open(tokens, len(tokens))
    assert table is not None
    assert cache.grow(table, len(tokens))
    cache.commit(table, tokens, len(tokens))
    return table


def held(content: Sequence[Sequence[int | None]], table: BlockTable, count: int) -> list[int | None]:
    """Return the first ``count`` tokens that a table's blocks hold; ``content``: of every block, slot by slot."""
    return [token for block in table.blocks for token in content[block]][:count]
