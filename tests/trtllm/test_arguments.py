"""Deployments as arguments of ``LLM(...)``: complete, and refused by name where TensorRT-LLM 1.2 has less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import DeploymentError
from inflight.serve.command import DEMO
from inflight.trtllm.api import classes
from inflight.trtllm.arguments import check_adapters, llm_arguments, max_sequence_length
from tests.trtllm.conftest import deployment


def engine_dir(directory: Path, **build: Any) -> str:
    """Write what stands for a compiled engine; return its name."""
    path = directory / "engine"
    path.mkdir(exist_ok=True)
    config = {"max_batch_size": 64, "max_num_tokens": 4096, "max_seq_len": 1000} | build
    (path / "config.json").write_text(json.dumps({"pretrained_config": {}, "build_config": config}))
    (path / "fake_checkpoint").write_text(str(DEMO / "model"))
    return "engine"


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
            {"decoding_type": "DraftTarget", "max_draft_len": 3, "speculative_model_dir": "draft"},
        ),
        (
            {"method": "eagle", "draft_model": "draft"},
            {"decoding_type": "Eagle", "max_draft_len": 4, "speculative_model_dir": "draft"},
        ),
        (
            {"method": "ngram", "max_ngram_size": 2},
            {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 2},
        ),
        (
            {"method": "medusa", "draft_model": "draft", "medusa_heads": 3},
            {"decoding_type": "Medusa", "max_draft_len": 4, "speculative_model_dir": "draft", "num_medusa_heads": 3},
        ),
        (
            {"method": "lookahead", "window_size": 5},
            {
                "decoding_type": "Lookahead",
                "max_window_size": 5,
                "max_ngram_size": 3,
                "max_verification_set_size": 4,
            },
        ),
    ],
    ids=lambda value: value.get("method", ""),
)
def test_every_method_of_speculation_in_a_flow_that_has_it(
    fake: None, tmp_path: Path, speculation: dict[str, Any], expected: dict[str, Any]
) -> None:
    compiled = speculation["method"] in ("medusa", "lookahead")
    settings = {"tensorrt_llm": {"engine_dir": engine_dir(tmp_path)}, "engine": {"kind": "trtllm"}} if compiled else {}
    arguments = llm_arguments(deployment(tmp_path, speculation=speculation, **settings))
    if "speculative_model_dir" in expected:
        expected["speculative_model_dir"] = str(tmp_path / "draft")
    assert arguments["speculative_config"] == expected
    assert arguments.get("sampler_type") == (None if compiled else "TorchSampler")
    config = classes(arguments)["speculative_config"]
    assert config.supports_backend("tensorrt" if compiled else "pytorch")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"speculation": {"method": "medusa", "draft_model": "d"}},
            "medusa, which TensorRT-LLM 1.2 lacks",
        ),
        ({"speculation": {"method": "lookahead"}}, "use draft_target, ngram, eagle"),
        (
            {"speculation": {"method": "ngram"}, "tensorrt_llm": {"sampler": "trtllm"}},
            "tensorrt_llm.sampler is trtllm, which TensorRT-LLM 1.2 lacks beside speculation",
        ),
        ({"tensorrt_llm": {"cuda_graph_batch_sizes": [64]}}, "between 1 and batching.max_batch_size, 32"),
        ({"kv_cache": {"block_size": 24}}, "kv_cache.block_size is 24; TensorRT-LLM takes powers of two"),
    ],
)
def test_what_the_pytorch_flow_lacks_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError, match=said):
        llm_arguments(deployment(**settings))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensorrt_llm": {"guided_decoding": "llguidance"}}, "a compiled engine has xgrammar only"),
        ({"tensorrt_llm": {"sampler": "torch"}}, "tensorrt_llm.sampler is for the PyTorch flow"),
        ({"tensorrt_llm": {"cuda_graph_batch_sizes": [1]}}, "cuda_graph_batch_sizes is for the PyTorch flow"),
        ({"engine": {"kind": "trtllm", "dtype": "bfloat16"}}, "engine.dtype is for the PyTorch flow"),
        ({"kv_cache": {"dtype": "fp8"}}, "kv_cache.dtype is part of a compiled engine"),
        ({"batching": {"max_batch_size": 65}}, "65 is more than the engine's max_batch_size, 64"),
        ({"speculation": {"method": "ngram"}}, "lacks in compiled engines; use eagle, medusa, lookahead"),
    ],
)
def test_what_a_compiled_engine_lacks_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    compiled = {"engine_dir": engine_dir(tmp_path)} | settings.pop("tensorrt_llm", {})
    settings = {"engine": {"kind": "trtllm"}} | settings
    with pytest.raises(DeploymentError, match=said):
        llm_arguments(deployment(tmp_path, tensorrt_llm=compiled, **settings))


def test_a_directory_that_is_no_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DeploymentError, match="not a TensorRT engine"):
        llm_arguments(deployment(tmp_path, engine={"kind": "trtllm"}, tensorrt_llm={"engine_dir": "."}))


def test_the_longest_sequence_is_the_least_of_what_is_known(tmp_path: Path) -> None:
    assert max_sequence_length(deployment()) == 2048
    assert max_sequence_length(deployment(limits={"max_sequence_length": 300})) == 300
    assert max_sequence_length(deployment(kv_cache={"tokens": 256})) == 256
    compiled = deployment(tmp_path, engine={"kind": "trtllm"}, tensorrt_llm={"engine_dir": engine_dir(tmp_path)})
    assert max_sequence_length(compiled) == 1000


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
        "import sys; from pathlib import Path; from inflight.deployment import resolve\n"
        "from inflight.trtllm.arguments import llm_arguments\n"
        f"data = {{'model': {str(DEMO / 'model')!r}, 'engine': {{'kind': 'trtllm'}}}}\n"
        "llm_arguments(resolve(data, Path('.'), 'x'))\n"
        "assert not {'torch', 'tensorrt_llm'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
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
