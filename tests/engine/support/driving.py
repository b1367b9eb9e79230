"""Drives an engine, and a cache, step by step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.request import Output, Request
from inflight.sampling import SamplingParams
from inflight.text.tokenizer import Tokenizer


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
            known = outputs.setdefault(output.key, Output(output.key))
            assert not known.finished, "an output came after the last one"
            known.extend(output)
    assert all(output.finished for output in outputs.values())
    assert_idle(engine)
    return outputs


def assert_idle(engine: Engine) -> None:
    """Check that no block is used or reserved."""
    cache = engine._cache
    cache.check()
    assert (cache.num_used_blocks, cache.num_reserved_blocks) == (0, 0)
    assert cache.num_free_blocks + cache.num_cached_blocks == cache.num_blocks


def fill(cache: KvCacheManager, tokens: list[int]) -> BlockTable:
    """Open a sequence, compute all of it and commit it."""
    table = cache.allocate(tokens, len(tokens))
    assert table is not None
    assert cache.grow(table, len(tokens))
    cache.commit(table, tokens, len(tokens))
    return table


def held(content: Sequence[Sequence[int | None]], table: BlockTable, count: int) -> list[int | None]:
    """Return the first ``count`` tokens that a table's blocks hold; ``content``: of every block, slot by slot."""
    return [token for block in table.blocks for token in content[block]][:count]


class Collector:
    """Takes a loop's outputs; knows which requests have ended."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.changed = threading.Condition()

    def __call__(self, output: Output) -> None:
        with self.changed:
            self.outputs.append(output)
            self.changed.notify_all()

    def wait(self, *requests: Request) -> list[Output]:
        """Return the last outputs of these requests; each has one, and it is the last."""
        keys = [request.key for request in requests]
        with self.changed:
            ended = self.changed.wait_for(lambda: set(keys) <= {out.key for out in self.outputs if out.finished}, 60)
            assert ended, "a request never ended"
            lasts = [[out for out in self.outputs if out.key == key] for key in keys]
        assert all(sum(out.finished for out in own) == 1 and own[-1].finished for own in lasts)
        return [own[-1] for own in lasts]
