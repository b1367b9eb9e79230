"""Deployments as arguments of ``LLM(...)``: complete, and refused by name where TensorRT-LLM 1.2 has less."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.trtllm.arguments import (
    check_adapters,
    check_positions,
    llm_arguments,
    max_batch_size,
    max_open_requests,
    max_sequence_length,
    sizes_in_words,
)
from inflight.trtllm.factory import classes
from tests.support.tables import each_row
from tests.trtllm.support.driving import checkpoint, deployment

FULL: dict[str, Any] = {
    "kv_cache": {"tokens": 8192, "block_size": 64, "dtype": "fp8", "prefix_reuse": False},
    "batching": {"max_batch_size": 8, "max_tokens_per_step": 2048, "policy": "max_utilization"},
    "tensorrt_llm": {
        "tensor_parallel_size": 2,
        "free_gpu_memory_fraction": 0.5,
        "host_cache_bytes": 1 << 30,
        "cuda_graph_batch_sizes": [8, 1, 4],
        "guided_decoding": "llguidance",
    },
    "limits": {"max_sequence_length": 512},
}


def test_everything_of_the_pytorch_flow() -> None:
    arguments = llm_arguments(deployment(**FULL))
    assert arguments == {
        "model": str(DEMO / "model"),
        "tokenizer": str(DEMO / "model"),
        "skip_tokenizer_init": False,
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "kv_cache_config": {
            "enable_block_reuse": False,
            "free_gpu_memory_fraction": 0.5,
            "max_tokens": 8192,
            "host_cache_size": 1 << 30,
            "tokens_per_block": 64,
            "dtype": "fp8",
        },
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "max_batch_size": 8,
        "max_num_tokens": 2048,
        "max_seq_len": 512,
        "enable_chunked_prefill": True,
        "return_perf_metrics": True,
        "enable_iter_perf_stats": True,
        "sampler_type": "TRTLLMSampler",
        "cuda_graph_config": {"batch_sizes": [1, 4, 8], "enable_padding": True},
        "guided_decoding_backend": "llguidance",
    }


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        (
            {"method": "draft_target", "draft_model": "draft", "max_draft_tokens": 3},
            {"max_draft_len": 3, "speculative_model_dir": "draft"},
        ),
        ({"method": "eagle", "draft_model": "draft"}, {"max_draft_len": 4, "speculative_model_dir": "draft"}),
        ({"method": "ngram", "max_ngram_size": 2}, {"max_draft_len": 4, "max_matching_ngram_size": 2}),
    ],
    ids=lambda value: value.get("method", ""),
)
def test_drafts_in_the_pytorch_flow(
    fake: None, tmp_path: Path, speculation: dict[str, Any], expected: dict[str, Any]
) -> None:
    arguments = llm_arguments(deployment(tmp_path, speculation=speculation))
    if "speculative_model_dir" in expected:
        expected["speculative_model_dir"] = str(tmp_path / "draft")
    config = classes(arguments)["speculative_config"]
    assert config.supports_backend("pytorch")
    assert config.model_dump(exclude_unset=True) == expected
    assert arguments["sampler_type"] == "TorchSampler"


@each_row(
    ("settings", "said"),
    [
        (
            {"speculation": {"method": "ngram"}, "tensorrt_llm": {"sampler": "trtllm"}},
            "tensorrt_llm.sampler is trtllm, which TensorRT-LLM 1.2 lacks beside speculation",
        ),
        ({"tensorrt_llm": {"cuda_graph_batch_sizes": [4096]}}, "between 1 and batching.max_batch_size, 64"),
        ({"kv_cache": {"block_size": 24}}, "kv_cache.block_size is 24; TensorRT-LLM takes powers of two"),
    ],
)
def test_what_the_pytorch_flow_lacks_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError, match=said):
        llm_arguments(deployment(**settings))


@each_row(
    ("settings", "said"),
    [
        ({"tensorrt_llm": {"engine_dir": "engine"}}, "`tensorrt_llm.engine_dir` needs another kind than trtllm: {}"),
        ({"speculation": {"method": "medusa", "draft_model": "d"}}, "`speculation.method: medusa` needs a .*: {}"),
        ({"speculation": {"method": "lookahead"}}, "`speculation.method: lookahead` needs a compiled engine: {}"),
    ],
)
def test_what_compiled_engines_alone_have_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError, match=said.format("compiled engines are served by `engine.kind: tensorrtllm`")):
        deployment(**settings)


def test_sizes_are_always_said() -> None:
    """The portable engine's defaults do not reach TensorRT-LLM, nor do TensorRT-LLM's own where they cost memory."""
    arguments = llm_arguments(deployment())
    assert (arguments["max_batch_size"], arguments["max_seq_len"], "max_num_tokens" in arguments) == (64, 2048, False)
    assert llm_arguments(deployment(batching={"max_batch_size": 3}))["max_batch_size"] == 3
    piped = deployment(tensorrt_llm={"pipeline_parallel_size": 2})
    assert (max_batch_size(piped), max_open_requests(piped)) == (64, 128)


def test_the_samplers_memory(set_fault: Callable[..., None]) -> None:
    """At TensorRT-LLM's own 2,048 sequences the sampler would take 32 times as much."""
    set_fault(sampler_bytes=8_000_000)
    given = llm_arguments(deployment(limits={"max_sequence_length": 2048}))
    make = classes(given).copy
    from tensorrt_llm.llmapi import LLM

    LLM(**make()).shutdown()
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        LLM(**make() | {"max_batch_size": 2048})


def test_the_log_says_what_the_sizes_cost() -> None:
    assert sizes_in_words(deployment()) == (
        "TensorRT-LLM runs 64 sequences of up to 2,048 tokens at once, the model's own limit; set "
        "limits.max_sequence_length to what is needed; the buffers of the trtllm sampler take about 0.00 GB for that"
    )
    said = sizes_in_words(deployment(limits={"max_sequence_length": 100}, tensorrt_llm={"sampler": "torch"}))
    assert said == "TensorRT-LLM runs 64 sequences of up to 100 tokens at once"


def test_beside_adapters_there_are_no_cuda_graphs() -> None:
    assert "cuda_graph_config" not in llm_arguments(deployment())
    assert llm_arguments(deployment(tensorrt_llm={"lora": {"a": "a"}}))["cuda_graph_config"] is None
    both = deployment(tensorrt_llm={"lora": {"a": "a"}, "cuda_graph_batch_sizes": [1]})
    with pytest.raises(DeploymentError, match="cuda_graph_batch_sizes: CUDA graphs are off beside tensorrt_llm.lora"):
        llm_arguments(both)


@pytest.mark.parametrize("part", [None, "none", []])
def test_a_text_part_may_be_nothing(tmp_path: Path, part: Any) -> None:
    given = checkpoint(tmp_path, text_config=part, max_position_embeddings=512)
    assert max_sequence_length(given) == 512
    check_positions(given.model)


LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0}
OLD_LLAMA_3 = {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}


@pytest.mark.parametrize(
    ("config", "lost"),
    [
        ({"rope_parameters": LLAMA_3}, "rope_theta 500000, rope_type llama3"),
        ({"rope_parameters": LLAMA_3, "rope_theta": 500_000.0}, "has rope_type llama3 in"),
        ({"rope_parameters": LLAMA_3, "rope_scaling": OLD_LLAMA_3["rope_scaling"]}, "has rope_theta 500000 in"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "has partial_rotary_factor 0.5 in"),
        ({"text_config": {"rope_parameters": {"rope_theta": 1e6}}}, "has rope_theta 1e.06 in"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}}, "rope_theta 1e.06"),
        ({"rope_parameters": {"rope_theta": "much"}}, 'has rope_theta "much" in'),
    ],
)
def test_positions_that_would_be_misread_are_refused(tmp_path: Path, config: dict[str, Any], lost: str) -> None:
    given = checkpoint(tmp_path, **{"rope_theta": None, "rope_scaling": None} | config)
    with pytest.raises(DeploymentError, match=f"config.json has .*{lost}|config.json {lost}") as said:
        check_positions(given.model)
    assert "write them beside it" in str(said.value)


@pytest.mark.parametrize(
    "config",
    [
        {},
        OLD_LLAMA_3 | {"rope_parameters": LLAMA_3},
        OLD_LLAMA_3 | {"rope_parameters": None},
        {"rope_parameters": {"rope_theta": 10_000, "rope_type": "default"}, "rope_theta": None},
    ],
)
def test_positions_that_are_read_as_written_pass(tmp_path: Path, config: dict[str, Any]) -> None:
    check_positions(checkpoint(tmp_path, **config).model)


def test_the_longest_sequence_is_the_least_of_what_is_known() -> None:
    assert max_sequence_length(deployment()) == 2048
    assert max_sequence_length(deployment(limits={"max_sequence_length": 300})) == 300
    assert max_sequence_length(deployment(kv_cache={"tokens": 256})) == 256


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        ([{"r": 65, "target_modules": ["q_proj"]}], "tensorrt_llm.lora.a0 has rank 65; max_lora_rank is 64"),
        ([{"r": 8, "target_modules": ["q_proj"]}, {"r": 8, "target_modules": ["v_proj"]}], "adapt the same modules"),
        ([None], "adapter_config.json: missing"),
    ],
)
def test_adapters_that_cannot_be_served(tmp_path: Path, configs: list[dict[str, Any] | None], said: str) -> None:
    lora = {}
    for number, config in enumerate(configs):
        path = tmp_path / f"a{number}"
        path.mkdir()
        lora[path.name] = path.name
        if config is not None:
            (path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(DeploymentError, match=said):
        check_adapters(deployment(tmp_path, tensorrt_llm={"lora": lora}))


def test_the_arguments_need_nothing_heavy() -> None:
    program = (
        "import sys; from pathlib import Path; from inflight.settings.deployment import resolve\n"
        "from inflight.trtllm.arguments import llm_arguments\n"
        f"data = {{'model': {str(DEMO / 'model')!r}, 'engine': {{'kind': 'trtllm'}}}}\n"
        "llm_arguments(resolve(data, Path('.'), 'x'))\n"
        "assert not {'torch', 'tensorrt_llm'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_rank_of_adapters_needs_adapters() -> None:
    with pytest.raises(DeploymentError, match="`tensorrt_llm.max_lora_rank` needs adapters in `tensorrt_llm.lora`"):
        deployment(tensorrt_llm={"max_lora_rank": 8})


@each_row(
    "settings",
    [
        {"tensorrt_llm": {"watchdog_s": 5}},
        {"speculation": {"max_draft_tokens": 2}},
        {"tensorrt_llm": {"lora": {"a": "a"}}, "engine": {"kind": "replay"}},
    ],
)
def test_settings_of_another_engine_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(DeploymentError, match=r"needs `engine.kind:` trtllm or tensorrtllm|needs `method:`"):
        deployment(**{"engine": {"kind": "pytorch"}} | settings)
    with pytest.raises(DeploymentError, match="`engine.threads` needs `engine.kind:` pytorch; it is trtllm"):
        deployment(engine={"kind": "trtllm", "threads": 2})


def test_tensorrt_llm_has_an_hour_to_start() -> None:
    assert deployment().start_timeout_s == 3600
    compiled = {"engine": {"kind": "tensorrtllm"}, "tensorrt_llm": {"engine_dir": "engine"}}
    assert deployment(**compiled).start_timeout_s == 3600
    assert deployment(engine={"kind": "pytorch"}).start_timeout_s == 600
    assert deployment(server={"start_timeout_s": 9}).start_timeout_s == 9
