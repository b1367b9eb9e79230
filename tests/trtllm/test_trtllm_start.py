"""The start: how TensorRT-LLM's libraries read the checkpoint, the process's environment, and why a start fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.errors import DeploymentError
from inflight.text.tokenizer import Tokenizer
from inflight.trtllm import watchdog
from inflight.trtllm.engine import TrtLlmEngine
from inflight.trtllm.factory import leave_mpi_job, make_engine
from tests.trtllm.support.driving import ask, checkpoint, deployment, run

Start = Callable[..., TrtLlmEngine]
SetFault = Callable[..., None]
NEWER = {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}, "rope_theta": None}


def test_positions_are_computed_as_the_portable_engine_does(start: Start, tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompts = tokenizer.encode_batch(["What is a paged KV cache? " * 8], add_special_tokens=True)
    both = {"rope_parameters": {"rope_theta": 20.0, "rope_type": "default"}, "rope_theta": 20.0}
    given = checkpoint(tmp_path, **both)
    [theirs] = run(start(given), ask(prompts[0]))
    [ours] = run(Engine.load(EngineConfig.of(given), tokenizer), ask(prompts[0]))
    [other] = run(Engine.load(EngineConfig.of(deployment()), tokenizer), ask(prompts[0]))
    assert theirs.tokens == ours.tokens != other.tokens


def test_positions_that_would_be_misread_stop_the_start(start: Start, tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="has rope_theta 500000 in rope_parameters alone"):
        start(checkpoint(tmp_path, **NEWER))


def test_positions_of_a_draft_model_count_too(start: Start, tmp_path: Path) -> None:
    checkpoint(tmp_path, **NEWER)
    drafts = {"method": "draft_target", "draft_model": str(tmp_path)}
    with pytest.raises(DeploymentError, match=f"{tmp_path}/config.json has rope_theta 500000"):
        start(deployment(speculation=drafts))


def test_code_of_a_checkpoint_is_not_run(start: Start, tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration_own.OwnConfig"}
    with pytest.raises(DeploymentError, match=r"brings code of its own \(auto_map in .* is not run here"):
        start(checkpoint(tmp_path, auto_map=auto_map, model_type="own"))


def test_a_known_model_may_bring_code_that_is_not_needed(start: Start, tmp_path: Path) -> None:
    """As many do that had it before transformers did."""
    auto_map = {"AutoConfig": "configuration_own.OwnConfig"}
    assert run(start(checkpoint(tmp_path, auto_map=auto_map)), ask([1, 2, 3]))


def test_the_engines_process_is_no_rank_of_an_mpi_job(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ("OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_precondition_transports", "PMIX_RANK", "PMI_SIZE")
    kept = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_btl", "TLLM_WORKER_USE_SINGLE_PROCESS")
    for name in (*job, *kept):
        monkeypatch.setenv(name, "1")
    start(deployment())
    assert not set(job) & set(os.environ)
    assert set(kept) <= set(os.environ)
    leave_mpi_job()  # a second engine in the process has nothing to leave


def test_the_log_says_that_adapters_switch_graphs_off(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"r": 8, "target_modules": ["q_proj"], "fake_bias": {}}')
    with caplog.at_level("INFO", "inflight.trtllm"):
        start(deployment(tmp_path, tensorrt_llm={"lora": {"a": "adapter"}}))
    assert "TensorRT-LLM runs 64 sequences of up to 2,048 tokens at once" in caplog.text
    assert "CUDA graphs are off beside LoRA adapters" in caplog.text


@pytest.mark.proof
@pytest.mark.parametrize("fault", [{"raise_in_generate": "illegal instruction"}, {"stall_after": 0}])
def test_a_failed_start_leaves_nothing_and_ends_no_server(
    start: Start, set_fault: SetFault, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.0)
    set_fault(**fault)
    ended, before = threading.Event(), set(threading.enumerate())
    with pytest.raises(DeploymentError, match="first generation of TensorRT-LLM failed"):
        start(deployment(server={"start_timeout_s": 1}), ended.set)
    assert not ended.wait(0.1)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("faults", "settings", "said"),
    [
        ({"version": "1.3.0rc1"}, {}, r"TensorRT-LLM 1.3.0rc1 is installed, 1.2.x is served; use the image nvcr.io"),
        ({"crash_at_start": "out of memory"}, {}, "cannot serve this deployment: RuntimeError: out of memory"),
        (
            {"raise_in_generate": "illegal instruction"},
            {},
            "first generation of TensorRT-LLM failed",
        ),
        ({"gpus": 1}, {"tensorrt_llm": {"tensor_parallel_size": 2}}, "needs 2 GPUs, here are 1"),
    ],
)
def test_starts_that_fail_say_why_in_one_line(
    start: Start, set_fault: SetFault, faults: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    set_fault(**faults)
    with pytest.raises(DeploymentError, match=said):
        start(deployment(**settings))


def test_without_tensorrt_llm(tokenizer: Tokenizer) -> None:
    with pytest.raises(DeploymentError, match=r"cannot be imported .* use the image nvcr.io/nvidia/tritonserver"):
        make_engine(deployment(), tokenizer, lambda: None)
