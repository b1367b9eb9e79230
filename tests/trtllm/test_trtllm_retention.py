"""KV retention on TensorRT-LLM: the contract's tensors, by the names of its API, and what they change there."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from inflight.engine.kvcache.retention import Retention, RetentionRange, retention_of
from inflight.engine.request import Request
from inflight.errors import UnsupportedFeature
from inflight.text.tokenizer import Tokenizer
from inflight.trtllm.engine import TrtLlmEngine
from inflight.trtllm.factory import RequestArguments
from tests.trtllm.support.driving import ask, deployment, run

RECORDED = json.loads((Path(__file__).parents[1] / "facts/llm_api.json").read_text())["KvCacheRetentionConfig"]
KEPT = list(range(100, 164))
"""A prompt of four blocks."""


def retaining(prompt: list[int], retention: Retention, **sampling: Any) -> Request:
    """Return a request that says how long its blocks are worth keeping."""
    request = ask(prompt, **sampling)
    request.retention = retention
    return request


def test_the_fake_takes_what_was_recorded(fake: None) -> None:
    from tensorrt_llm.llmapi import KvCacheRetentionConfig

    for taken, recorded in (
        (KvCacheRetentionConfig, RECORDED["parameters"]),
        (KvCacheRetentionConfig.TokenRangeRetentionConfig, RECORDED["TokenRangeRetentionConfig"]),
    ):
        assert list(inspect.signature(taken).parameters) == [one["name"] for one in recorded]


def test_every_part_arrives_by_its_own_name(fake: None, tokenizer: Tokenizer) -> None:
    arguments = RequestArguments(deployment(), tokenizer)
    assert "kv_cache_retention_config" not in arguments.of(ask(KEPT)), "who says nothing has TensorRT-LLM's default"
    retention = retention_of([0, 32], [16, -1], [90, 20], [500, -1], 60, 9, len(KEPT))
    made = arguments.of(retaining(KEPT, retention))["kv_cache_retention_config"]
    ranges = [(one.token_start, one.token_end, one.priority) for one in made.token_range_retention_configs]
    assert ranges == [(0, 16, 90), (32, 64, 20)]
    durations = [one.duration_ms for one in made.token_range_retention_configs]
    assert durations == [timedelta(milliseconds=500), None]
    assert (made.decode_retention_priority, made.decode_duration_ms) == (60, timedelta(milliseconds=9))
    alone = arguments.of(retaining(KEPT, (RetentionRange(0, 16, 90, None),)))["kv_cache_retention_config"]
    assert (alone.decode_retention_priority, alone.decode_duration_ms) == (35, None)


@pytest.mark.parametrize(("priority", "found"), [(90, 63), (5, 0)])
def test_what_is_worth_more_is_found_again(start: Callable[..., TrtLlmEngine], priority: int, found: int) -> None:
    """Twice as much as the cache holds is asked in between."""
    cache = {"block_size": 16, "tokens": 256}
    engine = start(deployment(kv_cache=cache, limits={"max_sequence_length": 128}))
    run(engine, retaining(KEPT, (RetentionRange(0, None, priority, None),), max_tokens=4, ignore_eos=True))
    for first in range(200, 208):
        run(engine, ask([first] * 64, max_tokens=4, ignore_eos=True))
    [again] = run(engine, ask(KEPT, max_tokens=4, ignore_eos=True))
    assert again.metrics is not None
    assert again.metrics.cached_tokens == found


def test_without_reuse_it_is_refused_by_name(start: Callable[..., TrtLlmEngine]) -> None:
    engine = start(deployment(kv_cache={"prefix_reuse": False}))
    with pytest.raises(UnsupportedFeature, match=r"retention_\* is not supported by this deployment"):
        engine.validate(retaining(KEPT, (RetentionRange(0, None, 5, None),)))
