"""Deployments as arguments of ``LLM(...)``: complete, and refused by name where TensorRT-LLM 1.2 has less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inflight.deployment import Deployment
from inflight.errors import DeploymentError
from inflight.kv_cache import KvCacheSettings
from inflight.resources import DEMO
from inflight.trtllm.api import classes
from inflight.trtllm.arguments import check_adapters, llm_arguments, max_batch_size, max_sequence_length
from tests.trtllm.conftest import deployment


def engine_dir(directory: Path, **build: Any) -> str:
    """Write what stands for a compiled engine; return its name."""
    path = directory / "engine"
    path.mkdir(exist_ok=True)
    config = {"max_batch_size": 8, "max_num_tokens": 4096, "max_seq_len": 1000, "max_draft_len": 0}
    config["plugin_config"] = {"use_paged_context_fmha": True, "tokens_per_block": 32, "lora_plugin": None}
    pretrained = {"mapping": {"tp_size": 1, "pp_size": 1}, "quantization": {"kv_cache_quant_algo": None}}
    (path / "config.json").write_text(json.dumps({"pretrained_config": pretrained, "build_config": config | build}))
    (path / "fake_checkpoint").write_text(str(DEMO / "model"))
    (path / "rank0.engine").write_bytes(b"engine")
    return "engine"


LLM_ARGS = json.loads((Path(__file__).parents[1] / "facts/llm_args.json").read_text())
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
    """Compiled engines are held to what they were built with: tests/export/test_engine_round_trip.py."""
    arguments = llm_arguments(deployment(tmp_path, speculation=speculation))
    if "speculative_model_dir" in expected:
        expected["speculative_model_dir"] = str(tmp_path / "draft")
    config = classes(arguments)["speculative_config"]
    assert config.supports_backend("pytorch")
    assert config.model_dump(exclude_unset=True) == expected
    assert arguments["sampler_type"] == "TorchSampler"


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
        ({"tensorrt_llm": {"cuda_graph_batch_sizes": [4096]}}, "between 1 and batching.max_batch_size, 2048"),
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
        ({"tensorrt_llm": {"sampler": "torch"}}, "`tensorrt_llm.sampler` needs the PyTorch flow"),
        ({"tensorrt_llm": {"cuda_graph_batch_sizes": [1]}}, "cuda_graph_batch_sizes` needs the PyTorch flow"),
        ({"tensorrt_llm": {"parameters": {"cuda_graph_mode": "true"}}}, "parameters` needs `engine.kind:` tensorrtllm"),
        ({"tensorrt_llm": {"tensor_parallel_size": 4}}, "tensor_parallel_size is 4; the engine was compiled for 1"),
        ({"tensorrt_llm": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size is 2; the engine was compiled for 1"),
        ({"tensorrt_llm": {"lora": {"a": "a"}}}, "tensorrt_llm.lora: the engine was compiled without LoRA"),
        ({"engine": {"kind": "trtllm", "dtype": "bfloat16"}}, "`engine.dtype` needs the PyTorch flow"),
        ({"kv_cache": {"dtype": "fp8"}}, "kv_cache.dtype is fp8; the engine was compiled with auto"),
        ({"kv_cache": {"block_size": 64}}, "kv_cache.block_size is 64; the engine was compiled with 32"),
        ({"batching": {"max_batch_size": 9}}, "batching.max_batch_size is 9; the engine was compiled with 8"),
        ({"batching": {"max_tokens_per_step": 9}}, "batching.max_tokens_per_step is 9; the engine was compiled with"),
        ({"limits": {"max_sequence_length": 9}}, "limits.max_sequence_length is 9; the engine was compiled with 1000"),
        ({"speculation": {"method": "ngram"}}, "lacks in compiled engines; use eagle, medusa, lookahead"),
        ({"speculation": {"method": "lookahead"}}, "speculation drafts 15 tokens; the engine was compiled for 0"),
        ({"speculation": {"method": "eagle", "draft_model": "d"}}, "method is eagle; the engine was compiled for none"),
    ],
)
def test_what_a_compiled_engine_lacks_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    given = {"engine_dir": engine_dir(tmp_path)} | settings.pop("tensorrt_llm", {})
    settings = {"engine": {"kind": "trtllm"}} | settings
    with pytest.raises(DeploymentError, match=said):
        llm_arguments(deployment(tmp_path, tensorrt_llm=given, **settings))


def test_a_directory_that_is_no_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = deployment(tmp_path, engine={"kind": "trtllm"}, tensorrt_llm={"engine_dir": "."})
    for text in ("{}", "[]", "{", '{"pretrained_config": {"mapping": []}, "build_config": {"plugin_config": {}}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DeploymentError, match=r"engine_dir: .*config.json is not that of a TensorRT engine"):
            llm_arguments(given)
    (tmp_path / "config.json").unlink()
    with pytest.raises(DeploymentError, match=r"engine_dir: .*config.json cannot be read: No such file"):
        llm_arguments(given)


def compiled(directory: Path, lora: dict[str, str] | None = None, **build: Any) -> Deployment:
    """Return a deployment of a compiled engine that says no more than it must."""
    settings = {"engine_dir": engine_dir(directory, **build)} | ({"lora": lora} if lora else {})
    return deployment(directory, engine={"kind": "trtllm"}, tensorrt_llm=settings)


def test_what_is_not_set_is_the_engines(tmp_path: Path) -> None:
    """An engine for 8 sequences must not be refused for a default that nobody wrote."""
    arguments = llm_arguments(compiled(tmp_path))
    assert (arguments["max_batch_size"], arguments["max_num_tokens"], arguments["max_seq_len"]) == (8, 4096, 1000)
    assert arguments["enable_chunked_prefill"]
    assert max_batch_size(compiled(tmp_path)) == 8


def test_an_engine_without_paged_context(tmp_path: Path) -> None:
    plugins = {"use_paged_context_fmha": "disable", "tokens_per_block": 32}
    arguments = llm_arguments(compiled(tmp_path, plugin_config=plugins))
    assert not arguments["enable_chunked_prefill"]
    assert not arguments["kv_cache_config"]["enable_block_reuse"]
    given = compiled(tmp_path, plugin_config=plugins)
    asked = given.model_copy(update={"kv_cache": KvCacheSettings(prefix_reuse=True)})
    with pytest.raises(DeploymentError, match="prefix_reuse is true; the engine was compiled without use_paged_contex"):
        llm_arguments(asked)


def test_adapters_of_an_engine(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/adapter_config.json").write_text('{"r": 16, "target_modules": ["q_proj"]}')
    plugins = {"use_paged_context_fmha": True, "lora_plugin": "auto"}
    given = compiled(tmp_path, {"a": "a"}, plugin_config=plugins, lora_config={"max_lora_rank": 8})
    assert llm_arguments(given)["lora_config"]["max_lora_rank"] == 8, "the engine's, for none is set"
    with pytest.raises(DeploymentError, match="tensorrt_llm.lora.a has rank 16; max_lora_rank is 8"):
        check_adapters(given)
    settings = given.tensorrt_llm.model_copy(update={"max_lora_rank": 16})
    with pytest.raises(DeploymentError, match="max_lora_rank is 16; the engine was compiled with 8"):
        llm_arguments(given.model_copy(update={"tensorrt_llm": settings}))


def test_defaults_of_the_portable_engine_do_not_reach_tensorrt_llm() -> None:
    assert not {"max_batch_size", "max_num_tokens"} & set(llm_arguments(deployment()))
    recorded = {field["name"]: field["default"] for field in LLM_ARGS["BaseLlmArgs"]}
    assert max_batch_size(deployment()) == int(recorded["max_batch_size"])
    assert max_batch_size(deployment(batching={"max_batch_size": 3})) == 3


def test_the_longest_sequence_is_the_least_of_what_is_known(tmp_path: Path) -> None:
    assert max_sequence_length(deployment()) == 2048
    assert max_sequence_length(deployment(limits={"max_sequence_length": 300})) == 300
    assert max_sequence_length(deployment(kv_cache={"tokens": 256})) == 256
    assert max_sequence_length(compiled(tmp_path)) == 1000


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


def test_a_rank_of_adapters_needs_adapters() -> None:
    with pytest.raises(DeploymentError, match="`tensorrt_llm.max_lora_rank` needs adapters in `tensorrt_llm.lora`"):
        deployment(tensorrt_llm={"max_lora_rank": 8})


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
