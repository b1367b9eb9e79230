"""Settings of the scheduler: what would have no effect is refused by name, and all that is left reaches the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.engine.config import EngineConfig
from inflight.errors import DeploymentError, InvalidRequest, UnsupportedFeature
from inflight.settings.batching import BatchingSettings
from inflight.settings.deployment import LimitSettings, validate
from inflight.triton.request_reader import read_request
from tests.support.tables import each_row


@each_row(
    ("settings", "says"),
    [
        ({"mode": "inflght"}, "`batching.mode` is 'inflght'.*'inflight', 'dynamic' or 'static'"),
        ({"max_queue_delay_ms": 5}, "`batching.max_queue_delay_ms` .*needs `mode: dynamic`"),
        ({"mode": "static", "max_queue_delay_ms": 5}, "needs `mode: dynamic`"),
        ({"mode": "dynamic", "max_queue_delay_ms": -1}, "batching.max_queue_delay_ms"),
        ({"max_tokens_per_step": 64, "prefill_chunk_tokens": 65}, "must not be above max_tokens_per_step, 64"),
        ({"prefill_chunk_tokens": 0}, "batching.prefill_chunk_tokens"),
        ({"fairness": "user"}, "`batching.fairness` is 'user'.*'none' or 'client'"),
        ({"priority_aging_s": 0}, "batching.priority_aging_s"),
    ],
)
def test_wrong_settings_stop_the_start(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(DeploymentError, match=says):
        validate({"model": ".", "batching": settings}, "deployment.yaml")


@each_row("kind", ["trtllm", "tensorrtllm", "replay"])
@each_row(
    "settings",
    [
        {"mode": "static"},
        {"mode": "dynamic", "max_queue_delay_ms": 5},
        {"prefill_chunk_tokens": 8},
    ],
)
def test_other_engines_refuse_what_only_the_portable_one_reads(kind: str, settings: dict[str, Any]) -> None:
    with pytest.raises(DeploymentError, match=f"`batching.{next(iter(settings))}` needs `engine.kind:` pytorch; it is"):
        validate({"model": ".", "engine": {"kind": kind}, "batching": settings}, "deployment.yaml")


@each_row(("kind", "reads"), [("pytorch", True), ("trtllm", True), ("replay", False)])
def test_the_order_of_the_queue_is_set_where_there_is_one(kind: str, reads: bool) -> None:
    data = {"model": ".", "engine": {"kind": kind}, "batching": {"priority_aging_s": 5, "fairness": "client"}}
    if reads:
        batching = validate(data, "deployment.yaml").batching
        assert (batching.priority_aging_ns, batching.fairness) == (5_000_000_000, "client")
        return
    with pytest.raises(DeploymentError, match="`batching.fairness` needs `engine.kind:` pytorch or trtllm"):
        validate(data, "deployment.yaml")


def test_every_setting_reaches_the_engine() -> None:
    given = {
        "mode": "dynamic",
        "max_queue_delay_ms": 7,
        "max_batch_size": 9,
        "max_tokens_per_step": 77,
        "prefill_chunk_tokens": 33,
        "policy": "max_utilization",
        "fairness": "client",
        "priority_aging_s": None,
    }
    config = EngineConfig.of(validate({"model": ".", "batching": given}, "deployment.yaml"))
    known = {name: getattr(config, name) for name in given if name != "priority_aging_s"}
    assert known | {"priority_aging_s": None} == given
    assert config.priority_aging_ns is None
    loop_only = {"max_queue_size"}
    assert set(BatchingSettings.model_fields) == set(given) | loop_only


def test_the_defaults_are_one() -> None:
    """An engine without a deployment has those of a deployment, and chooses none by its speed."""
    bare, deployed = EngineConfig(Path()), EngineConfig.of(validate({"model": "."}, "deployment.yaml"))
    assert replace(deployed, model=bare.model, automatic=frozenset()) == bare


def _read(client: object, engine: str = "pytorch") -> list[str]:
    arrays = {
        "input_ids": np.array([[1, 2], [3, 4]], np.int32),
        "request_output_len": np.array([4, 4], np.int32),
        "client_id": np.array(client, np.object_),
    }
    parts = read_request(
        arrays, "", LimitSettings(), 100, decoupled=True, engine=engine, max_sequences=256, by_client=True
    )[1]
    return [part.request.client_id for part in parts]


def test_the_client_of_each_row_is_read() -> None:
    assert _read([b"one", "zwölf".encode()]) == ["one", "zwölf"]
    assert _read([b"", b"x" * 256]) == ["", "x" * 256]
    with pytest.raises(InvalidRequest, match="client_id has 257 characters; it may have 256"):
        _read([b"", b"x" * 257])
    with pytest.raises(InvalidRequest, match="client_id is not valid UTF-8"):
        _read([b"\xff", b""])
    assert _read([b"one", b"two"], engine="trtllm") == ["one", "two"]
    with pytest.raises(UnsupportedFeature, match="client_id is not supported by this engine"):
        _read([b"one", b"two"], engine="replay")


@pytest.mark.parametrize(("tokens", "blocks"), [(10, 1), (100, 7), (96, 6)])
def test_a_cache_of_part_of_a_block_is_rounded_up_and_the_log_says_so(
    tokens: int, blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig.of(validate({"model": ".", "kv_cache": {"tokens": tokens}}, "deployment.yaml"))
    assert config.num_blocks == blocks
    said = f"kv_cache.tokens is {tokens}; it is rounded up to {16 * blocks}, whole blocks of 16"
    assert (said in caplog.text) == bool(tokens % 16)
