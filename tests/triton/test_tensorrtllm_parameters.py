"""The engine's model on upstream's C++ backend: its pbtxt and parameters, held against the recorded tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from inflight.contract import MAX_BATCH_SIZE
from inflight.errors import DeploymentError
from inflight.resources import MODEL_REPOSITORY
from inflight.serve.command import override_server
from inflight.serve.repository import KINDS, orchestrator_environment, parameters, prepare_repository
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import Deployment, load_deployment
from tests.triton.support.servers import write_engine
from tests.triton.support.upstream_backend import write_deployment

FACTS = json.loads((Path(__file__).parents[1] / "facts/tensorrt_llm_model.json").read_text())


def engine_pbtxt(deployment: Deployment, directory: Path) -> str:
    """Return the pbtxt of the engine's model in the repository that would be served."""
    repository = prepare_repository(MODEL_REPOSITORY, deployment, directory / "repository")
    return (repository / "tensorrt_llm/config.pbtxt").read_text()


def entries(text: str, kind: str) -> dict[str, str]:
    block = text[text.index(f"\n{kind} [") :]
    return dict(re.findall(r'\{ name: "(\w+)" (.*) \}', block[: block.index("\n]")]))


@pytest.mark.parametrize("kind", ["input", "output"])
def test_tensors_are_exactly_upstreams(tmp_path: Path, kind: str) -> None:
    found = entries(engine_pbtxt(load_deployment(write_deployment(tmp_path)), tmp_path), kind)
    recorded = {tensor["name"]: tensor for tensor in FACTS[f"{kind}s"]}
    assert set(found) == set(recorded)
    for name, tensor in recorded.items():
        slot = tensor.get("data_type_template_slot")
        types = FACTS["template_slot_values"][slot] if slot else [tensor["data_type"]]
        assert re.search(r"data_type: (\w+)", found[name])[1] in types, name  # type: ignore[index]
        assert f"dims: [ {', '.join(map(str, tensor['dims']))} ]" in found[name]
        assert ("reshape: { shape: [ ] }" in found[name]) == ("reshape" in tensor), name
        assert ("allow_ragged_batch: true" in found[name]) == tensor.get("allow_ragged_batch", False), name
        if kind == "input":
            assert ("optional: true" in found[name]) == tensor["optional"], name


LEFT_OUT = {
    "encoder_model_path": "decoders only",
    "cross_kv_cache_fraction": "decoders only",
    "max_attention_window_size": "the engine's own",
    "sink_token_length": "none",
    "kv_cache_onboard_blocks": "internal; true by default",
    "cancellation_check_period_ms": "upstream's default",
    "stats_check_period_ms": "upstream's default",
    "iter_stats_max_iterations": "upstream's default",
    "request_stats_max_iterations": "upstream's default",
    "participant_ids": "only without spawned processes",
    "num_nodes": "one",
    "lora_cache_optimal_adapter_size": "no adapters in this kind",
    "lora_cache_max_adapter_size": "no adapters in this kind",
    "lora_cache_gpu_memory_fraction": "no adapters in this kind",
    "lora_cache_host_memory_bytes": "no adapters in this kind",
    "lora_prefetch_dir": "no adapters in this kind",
    "decoding_mode": "upstream's choice, without drafts",
    "lookahead_window_size": "without lookahead",
    "lookahead_ngram_size": "without lookahead",
    "lookahead_verification_set_size": "without lookahead",
    "medusa_choices": "without Medusa",
    "eagle_choices": "without EAGLE",
    "gpu_weights_percent": "no weight streaming",
    "enable_context_fmha_fp32_acc": "upstream's default",
    "multi_block_mode": "upstream's default",
    "cuda_graph_mode": "upstream's default",
    "cuda_graph_cache_size": "upstream's default",
    "speculative_decoding_fast_logits": "drafts from another model are not served",
    "max_tokens_in_paged_kv_cache": "no limit but the fraction",
}


def test_every_parameter_is_there_or_left_out_for_a_reason(tmp_path: Path) -> None:
    values = parameters(load_deployment(write_deployment(tmp_path)))
    template = {name for name, fact in FACTS["parameters"].items() if fact.get("template_value") is not None}
    assert len(template) == FACTS["counts"]["parameters_in_template"]
    assert set(values) | set(LEFT_OUT) == template
    assert not set(values) & set(LEFT_OUT)
    assert set(KINDS) == template | {"recv_poll_period_ms"}
    assert "${" not in engine_pbtxt(load_deployment(tmp_path), tmp_path)
    for name, fact in FACTS["parameters"].items():
        if isinstance(KINDS.get(name), tuple) and "choices" in fact and not fact.get("key_must_exist"):
            assert set(KINDS[name]) == set(fact["choices"])


def test_parameters_follow_the_deployment(tmp_path: Path) -> None:
    write_deployment(
        tmp_path,
        kv_cache={"tokens": 4096, "prefix_reuse": False},
        batching={"policy": "max_utilization", "max_queue_size": 7},
        speculation={"method": "lookahead", "window_size": 3, "max_ngram_size": 2, "verification_set_size": 1},
        tensorrt_llm={
            "engine_dir": "engine",
            "tensor_parallel_size": 2,
            "free_gpu_memory_fraction": 0.5,
            "host_cache_bytes": 1024,
            "parameters": {"cuda_graph_mode": "true", "kv_cache_free_gpu_mem_fraction": "0.25"},
        },
    )
    write_engine(tmp_path / "engine", 2, max_draft_len=3)
    deployment = load_deployment(tmp_path)
    values = parameters(deployment)
    assert values["gpt_model_path"] == str(tmp_path / "engine")
    assert values["max_tokens_in_paged_kv_cache"] == "4096"
    assert values["enable_kv_cache_reuse"] == "false"
    assert values["batch_scheduler_policy"] == "max_utilization"
    assert values["kv_cache_host_memory_bytes"] == "1024"
    assert values["kv_cache_free_gpu_mem_fraction"] == "0.25", (
        "parameters take the place of what the deployment implies"
    )
    assert values["cuda_graph_mode"] == values["enable_chunked_context"] == "true"
    assert (values["decoding_mode"], values["lookahead_window_size"]) == ("lookahead", "3")
    assert values["gpu_device_ids"] == "0,1"
    assert orchestrator_environment(deployment) == {"TRTLLM_ORCHESTRATOR": "1"}
    text = engine_pbtxt(deployment, tmp_path)
    assert "max_queue_size: 7" in text
    assert f"max_batch_size: {MAX_BATCH_SIZE}" in text
    assert "model_transaction_policy { decoupled: true }" in text


@pytest.mark.parametrize(("tokens", "choices"), [(2, "{0}, {0, 0}"), (63, None)])
def test_the_tree_of_drafts_is_said_again(tmp_path: Path, tokens: int, choices: str | None) -> None:
    write_deployment(tmp_path, speculation={"method": "medusa", "draft_model": "heads", "max_draft_tokens": tokens})
    write_engine(tmp_path / "engine", heads={"num_medusa_heads": 4}, max_draft_len=tokens)
    values = parameters(load_deployment(tmp_path))
    assert values["decoding_mode"] == "medusa"
    assert values.get("medusa_choices") == choices


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensorrt_llm": {}}, "tensorrt_llm.engine_dir is missing"),
        ({"tensorrt_llm": {"engine_dir": "nowhere"}}, "nowhere/config.json cannot be read"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; the engine was compiled for 1"),
        ({"batching": {"max_batch_size": 8}}, "batching.max_batch_size is 8; the engine was compiled with 32"),
        (
            {"limits": {"max_sequence_length": 64}},
            "limits.max_sequence_length is 64; the engine was",
        ),
        ({"kv_cache": {"dtype": "fp8"}}, "kv_cache.dtype is fp8; the engine was compiled with auto"),
        (
            {"engine": {"kind": "tensorrtllm", "dtype": "float32"}},
            "`engine.dtype` needs the PyTorch flow; a compiled engine has its own",
        ),
        ({"speculation": {"method": "ngram"}}, "ngram needs `engine.kind: trtllm`"),
        ({"speculation": {"method": "lookahead"}}, "speculation drafts 15 tokens; the engine was compiled for 0"),
        ({"parameters": {"max_beam_widht": "2"}}, "unknown name 'max_beam_widht' .did you mean 'max_beam_width'"),
        ({"parameters": {"worker_path": "x"}}, "unknown name 'worker_path'"),
        ({"parameters": {"max_beam_width": "two"}}, "max_beam_width is 'two'; it must be int"),
        ({"parameters": {"enable_kv_cache_reuse": "yes"}}, "it must be bool"),
        ({"parameters": {"batch_scheduler_policy": "greedy"}}, "'guaranteed_no_evict' or 'max_utilization'"),
        (
            {"guided_decoding": "xgrammar"},
            "`tensorrt_llm.guided_decoding` needs `engine.kind:` trtllm; it is tensorrtllm",
        ),
        ({"watchdog_s": 5}, "`tensorrt_llm.watchdog_s` needs"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_deployment_that_the_engine_does_not_follow_is_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    if not set(settings) & {"tensorrt_llm", "batching", "limits", "kv_cache", "engine", "speculation"}:
        settings = {"tensorrt_llm": {"engine_dir": "engine"} | settings}
    with pytest.raises(DeploymentError, match=reason) as caught:
        engine_pbtxt(load_deployment(write_deployment(tmp_path, **settings)), tmp_path)
    assert "\n" not in str(caught.value)


def test_what_the_engine_cannot_is_off_where_nothing_is_said(tmp_path: Path) -> None:
    write_deployment(tmp_path)
    write_engine(tmp_path / "engine", use_paged_context_fmha=False)
    values = parameters(load_deployment(tmp_path))
    assert values["enable_chunked_context"] == values["enable_kv_cache_reuse"] == "false"


def test_the_file_of_every_rank_must_be_there(tmp_path: Path) -> None:
    write_deployment(tmp_path, tensorrt_llm={"engine_dir": "engine", "tensor_parallel_size": 2})
    write_engine(tmp_path / "engine", 2)
    (tmp_path / "engine/rank1.engine").unlink()
    with pytest.raises(DeploymentError, match=r"tensorrt_llm.engine_dir: .*engine has no rank1.engine"):
        parameters(load_deployment(tmp_path))


def test_without_the_backend_the_image_is_named(tmp_path: Path) -> None:
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    server = TritonServer(tmp_path, override_server(load_deployment(write_deployment(tmp_path)), ports))
    with pytest.raises(DeploymentError, match=r"no backend tensorrtllm .*26.07-trtllm-python-py3 has it"):
        server.start()
    server.stop()


def test_a_manifest_of_another_machine_stops_the_start(tmp_path: Path) -> None:
    write_deployment(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema_version": 9}')
    with pytest.raises(DeploymentError, match="not a manifest of schema version 1"):
        TritonServer(tmp_path, load_deployment(tmp_path)).start()
