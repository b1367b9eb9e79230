"""Offload: tokens are transformers' whatever has come back, and a tier that cannot be had or goes says so in a line."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.engine import stats as stats_module
from inflight.engine.checkpoint import load_config
from inflight.engine.engine import Engine
from inflight.engine.kvcache import offload_pool as offload_pool_module
from inflight.engine.kvcache.blocks import BlockCopy
from inflight.engine.kvcache.memory_pool import Int8KvPool, KvPool
from inflight.engine.kvcache.offload_pool import HostMemory, MappedFile, OffloadPool, OffloadPoolLost, RestoreRule
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import PROMPTS, checkpoint, greedy
from tests.engine.support.driving import ask, load, run

COUNT = 12
SMALL: dict[str, Any] = {"num_blocks": 64, "max_tokens_per_step": 24, "offload_bytes": 2 << 20, "offload_min_tokens": 1}


def _ask_all(engine: Engine, name: str) -> int:
    """Ask every prompt, hold the answers to transformers', and return how many tokens were cached."""
    requests = [ask(prompt, COUNT) for prompt in PROMPTS]
    outputs = run(engine, requests)
    for request in requests:
        assert outputs[request.key].tokens == greedy(name, tuple(request.prompt), COUNT)
    return sum(output.metrics.cached_tokens for output in outputs.values() if output.metrics)


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
@pytest.mark.parametrize(("name", "to", "eviction"), [("llama", "file", "lru"), ("gemma3", "host", "prefix")])
def test_tokens_are_the_same_with_what_was_restored(name: str, to: str, eviction: str, policy: str) -> None:
    """The cache holds a fraction of what is asked; the second time all of it comes from the second tier."""
    engine = load(checkpoint(name), offload_to=to, eviction=eviction, policy=policy, **SMALL)
    first = _ask_all(engine, name)
    restored = engine.stats.kv_cache_restored_tokens
    second = _ask_all(engine, name)
    stats = engine.stats
    assert second > first + 300
    assert stats.kv_cache_restored_tokens > restored + 300
    assert stats.kv_cache_offloaded_tokens >= stats.kv_cache_offloaded_blocks * 4 > 300
    assert stats.kv_cache_evictions == 0, "all of it fits in the second tier"
    assert (stats.preemptions > 0) == (policy == "max_utilization")


def test_a_second_tier_that_is_too_small_forgets() -> None:
    engine = load(checkpoint("llama"), offload_to="host", eviction="prefix", **SMALL | {"offload_bytes": 40 * 4 * 768})
    for _ in range(2):
        _ask_all(engine, "llama")
    stats = engine.stats
    assert stats.kv_cache_offload_blocks_limit == 40 == stats.kv_cache_offloaded_blocks
    assert stats.kv_cache_evictions > 0
    assert stats.kv_cache_restored_tokens > 0


def test_an_int8_cache_comes_back_with_its_scales() -> None:
    engine = load(checkpoint("llama"), offload_to="host", kv_cache_dtype="int8", **SMALL)
    alone = load(checkpoint("llama"), kv_cache_dtype="int8", prefix_reuse=False, max_batch_size=1)
    expected = [output.tokens for output in run(alone, [ask(prompt, COUNT) for prompt in PROMPTS]).values()]
    for _ in range(2):
        outputs = run(engine, [ask(prompt, COUNT) for prompt in PROMPTS])
        assert sorted(output.tokens for output in outputs.values()) == sorted(expected)
    assert engine.stats.kv_cache_restored_tokens > 300


def _tensors(kind: type[KvPool] = KvPool) -> KvPool:
    config, device = load_config(checkpoint("llama")), torch.device("cpu")
    tensors = kind(config, 6, 4, torch.float32, device)
    for part in tensors.parts:
        part.view(torch.uint8).random_()
    return tensors


@pytest.mark.parametrize("kind", [KvPool, Int8KvPool])
def test_restored_blocks_are_the_same_bytes(kind: type[KvPool], tmp_path: Path) -> None:
    tensors = _tensors(kind)
    before = [part.view(torch.uint8).clone() for part in tensors.parts]
    pool = OffloadPool(tensors, 6, MappedFile(tmp_path, 3, tensors.nbytes // 6), RestoreRule(None))
    assert pool._storage.memory.nbytes * 2 == tensors.nbytes
    assert pool.pinned_bytes == 0
    # 0 and 3 leave, the offload block of 2 is taken for 3; 3 is overwritten in the same step; they come back elsewhere.
    pool.copy(
        [
            BlockCopy(0, 6),
            BlockCopy(2, 8),
            BlockCopy(3, 8),
            BlockCopy(1, 3),
            BlockCopy(6, 4),
            BlockCopy(8, 5),
            BlockCopy(5, 0),
        ]
    )
    sources = [3, 1, 2, 1, 0, 3]
    for part, old in zip(tensors.parts, before, strict=True):
        expected = torch.cat([old[:, :, 4 * block : 4 * block + 4] for block in sources], 2)
        assert torch.equal(part.view(torch.uint8), expected)


def test_many_blocks_are_copied_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_pool_module, "BLOCKS_AT_ONCE", 2)
    tensors = _tensors()
    before = [part.clone() for part in tensors.parts]
    pool = OffloadPool(tensors, 6, HostMemory(5, tensors.nbytes // 6), RestoreRule(None))
    pool.copy(
        [*[BlockCopy(block, 6 + block) for block in range(5)], *[BlockCopy(10 - block, block) for block in range(5)]]
    )
    for stored, old in zip(tensors.parts, before, strict=True):
        expected = torch.cat([old[:, :, 4 * block : 4 * block + 4] for block in (4, 3, 2, 1, 0, 5)], 2)
        assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))


def test_nothing_stays_behind(tmp_path: Path) -> None:
    """The file has no name from the beginning, so that even a killed process leaves nothing."""
    engine = load(checkpoint("llama"), offload_to="file", offload_directory=tmp_path, **SMALL)
    _ask_all(engine, "llama")
    assert engine.stats.kv_cache_offloaded_blocks > 0
    assert not list(tmp_path.iterdir())


def test_a_tier_that_cannot_be_had_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SMALL | {"offload_to": "file"}
    with pytest.raises(DeploymentError, match="offload: no file of .* bytes in .*missing: No such file or directory"):
        load(checkpoint("llama"), **settings, offload_directory=tmp_path / "missing")
    with pytest.raises(DeploymentError, match="offload.bytes is 100; one block takes 3072"):
        load(checkpoint("llama"), **settings | {"offload_bytes": 100})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DeploymentError, match="offload: no file of .* bytes in .*: No space left on device"):
        load(checkpoint("llama"), **settings, offload_directory=tmp_path)
    with pytest.raises(DeploymentError, match="offload.bytes is 1152921504606846976; the host has [0-9]+ free"):
        load(checkpoint("llama"), **settings | {"offload_to": "host", "offload_bytes": 1 << 60})


def test_a_tier_that_goes_is_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that was cut short is never touched again; what it held is computed, and the log says so once."""
    engine = load(checkpoint("llama"), offload_to="file", offload_directory=tmp_path, **SMALL)
    _ask_all(engine, "llama")
    pool = engine._runner.offload_pool
    assert pool is not None
    assert isinstance(pool._storage, MappedFile)
    os.ftruncate(pool._storage._file.fileno(), 4096)
    restored = engine.stats.kv_cache_restored_tokens
    with caplog.at_level(logging.ERROR):
        _ask_all(engine, "llama")
        _ask_all(engine, "llama")
    assert [record.getMessage() for record in caplog.records] == [
        "the KV cache's second tier is off: the file has 4096 bytes of 2095104; what it held is computed again"
    ]
    assert (engine.stats.kv_cache_restored_tokens, engine.stats.kv_cache_offloaded_blocks) == (restored, 0)
    assert engine.stats.kv_cache_offload_blocks_limit == 0
    pool.copy([BlockCopy(0, 64)])
    with pytest.raises(OffloadPoolLost):
        pool.copy([BlockCopy(64, 0)])


@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("restores", [False, True])
def test_a_tier_that_goes_within_a_step_ends_no_request(
    restores: bool, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is cut short after a step was planned: one that only saves goes on, one that restores is done again."""
    engine = load(checkpoint("llama"), offload_to="file", offload_directory=tmp_path, policy=policy, **SMALL)
    if restores:
        _ask_all(engine, "llama")
    pool, copy, met = engine._runner.offload_pool, OffloadPool.copy, Counter[bool]()
    assert pool is not None
    assert isinstance(pool._storage, MappedFile)
    file, end, preemptions = pool._storage._file.fileno(), pool._first, engine.stats.preemptions

    def copy_too_late(pool: OffloadPool, copies: Sequence[BlockCopy]) -> None:
        met.update({one.source >= end for one in copies if end <= max(one)})
        if met[restores]:
            os.ftruncate(file, 4096)
        copy(pool, copies)

    monkeypatch.setattr(OffloadPool, "copy", copy_too_late)
    _ask_all(engine, "llama")
    assert met[restores]
    assert not pool.check_usable()
    assert engine.stats.kv_cache_offload_blocks_limit == 0
    if policy == "guaranteed_no_evict":
        assert (engine.stats.preemptions > preemptions) == restores


@pytest.mark.parametrize("write", [False, True])
def test_what_the_kernel_cannot_fetch_is_not_touched(
    write: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file's size shows nothing, as when its disk fails or is full all the same: a touch would be SIGBUS."""
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 14):
        pytest.skip("this kernel cannot be asked")
    tensors = _tensors()
    pool = OffloadPool(tensors, 6, MappedFile(tmp_path, 3, tensors.nbytes // 6), RestoreRule(None))
    pool.copy([BlockCopy(0, 8)])
    assert isinstance(pool._storage, MappedFile)
    os.ftruncate(pool._storage._file.fileno(), 0)
    monkeypatch.setattr(os, "fstat", lambda _: SimpleNamespace(st_size=1 << 40))
    with nullcontext() if write else pytest.raises(OffloadPoolLost):
        pool.copy([BlockCopy(0, 8) if write else BlockCopy(8, 0)])
    assert not pool.check_usable()
    assert f"the kernel cannot {'write' if write else 'read'} the file: Bad address" in caplog.text


@pytest.mark.parametrize(("write", "advice"), [(False, 22), (True, 23)])
def test_pages_are_asked_for_as_they_will_be_used(
    write: bool, advice: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the numbers of Linux's ``mman-common.h``: a write needs room on the disk, which a read does not ask for."""
    asked = []
    kernel = SimpleNamespace(madvise=lambda _address, _size, advice: asked.append(advice))
    monkeypatch.setattr(offload_pool_module, "_LIBC", kernel)
    assert MappedFile(tmp_path, 3, 4096).fault([1], write) is None
    assert asked == [advice]


def test_a_restore_that_was_slow_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = _tensors()
    pool = OffloadPool(tensors, 6, HostMemory(3, tensors.nbytes // 6), RestoreRule(None))
    pool.rule.observe_compute(100, 1.0)
    pool.copy([BlockCopy(0, 6)])
    assert pool.rule.decide(4), "it has not been measured yet"
    clock = iter([0.0, 60.0])
    monkeypatch.setattr(offload_pool_module.time, "perf_counter", lambda: next(clock))
    pool.copy([BlockCopy(6, 1)])
    assert not pool.rule.decide(4)


def test_a_failed_step_restores_nothing_that_was_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails before its copies are made: what the books had moved is forgotten, and answers stay right."""
    engine = load(checkpoint("llama"), offload_to="host", **SMALL)
    _ask_all(engine, "llama")
    for prompt in PROMPTS[:3]:
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "run", lambda *_: 1 / 0)
            failed = ask([*prompt[::-1], 5], COUNT)
            assert run(engine, [failed])[failed.key].error is not None
        assert not len(engine._cache.offloaded)
        _ask_all(engine, "llama")


def test_the_time_that_prompts_take_is_that_of_running_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()  # each part of a step takes one, however long the machine stands still
    monkeypatch.setattr(stats_module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    engine = load(checkpoint("llama"), offload_to="host", **SMALL | {"offload_min_tokens": None})
    _ask_all(engine, "llama")
    pool = engine._runner.offload_pool
    assert pool is not None
    _, seconds = pool.rule._compute
    assert seconds > 0.2 * engine.stats.step_part["run"] / engine.stats.steps, "one step's at least, nearly"
    assert seconds < engine.stats.step_part["run"]
