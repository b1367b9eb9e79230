"""Upstream's C++ backend, ``tensorrtllm``: its parameters, all from the deployment, and its model's pbtxt.

What upstream would take no notice of is refused: a setting that the engine fixes otherwise, an unknown parameter, most
wrong values.
"""

from __future__ import annotations

import json
from typing import Any

from inflight.compiled_engine import agreed_engine
from inflight.contract import ENGINE, MAX_BATCH_SIZE
from inflight.deployment import Deployment
from inflight.errors import DeploymentError, nearest
from inflight.serve.pbtxt import render, variant_name
from inflight.speculation import SpeculationSettings, draft_tree

_TRUE, _FALSE = ("True", "true", "TRUE", "1"), ("False", "false", "FALSE", "0")
_POLICIES = ("guaranteed_no_evict", "max_utilization")
_MODES = ("top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle")

KINDS: dict[str, str | tuple[str, ...]] = {
    "max_beam_width": "int",
    "FORCE_CPU_ONLY_INPUT_TENSORS": ("no",),
    "gpt_model_type": ("V1", "v1", "inflight_batching", "inflight_fused_batching"),
    "gpt_model_path": "text",
    "encoder_model_path": "text",
    "max_tokens_in_paged_kv_cache": "int",
    "max_attention_window_size": "text",
    "sink_token_length": "int",
    "batch_scheduler_policy": _POLICIES,
    "kv_cache_free_gpu_mem_fraction": "float",
    "cross_kv_cache_fraction": "float",
    "kv_cache_host_memory_bytes": "int",
    "kv_cache_onboard_blocks": "bool",
    "exclude_input_in_output": "bool",
    "cancellation_check_period_ms": "int",
    "stats_check_period_ms": "int",
    "iter_stats_max_iterations": "int",
    "request_stats_max_iterations": "int",
    "enable_kv_cache_reuse": "bool",
    "normalize_log_probs": "bool",
    "enable_chunked_context": "bool",
    "gpu_device_ids": "text",
    "participant_ids": "text",
    "num_nodes": "int",
    "lora_cache_optimal_adapter_size": "int",
    "lora_cache_max_adapter_size": "int",
    "lora_cache_gpu_memory_fraction": "float",
    "lora_cache_host_memory_bytes": "int",
    "lora_prefetch_dir": "text",
    "decoding_mode": _MODES,
    "executor_worker_path": "text",
    "lookahead_window_size": "int",
    "lookahead_ngram_size": "int",
    "lookahead_verification_set_size": "int",
    "medusa_choices": "text",
    "eagle_choices": "text",
    "gpu_weights_percent": "float",
    "enable_context_fmha_fp32_acc": "bool",
    "multi_block_mode": "bool",
    "cuda_graph_mode": "bool",
    "cuda_graph_cache_size": "int",
    "speculative_decoding_fast_logits": "bool",
    "tokenizer_dir": "text",
    "guided_decoding_backend": ("", "xgrammar"),
    "xgrammar_tokenizer_info_path": "text",
    "recv_poll_period_ms": "int",
}
"""Parameters of upstream's backend, and how it reads each; a tuple: the values that it knows."""

_WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"


def engine_pbtxt(deployment: Deployment) -> str:
    """Return the complete pbtxt of the engine's model on upstream's backend.

    Raises:
        DeploymentError: there is no engine, it was compiled with other settings, or a parameter is unknown.
    """
    values = parameters(deployment)
    entries = "".join(
        f"parameters {{ key: {_quoted(key)} value: {{ string_value: {_quoted(value)} }} }}\n"
        for key, value in values.items()
    )
    queue = (
        f"dynamic_batching {{ preferred_batch_size: [ {MAX_BATCH_SIZE} ] max_queue_delay_microseconds: 0 "
        f"default_queue_policy: {{ max_queue_size: {deployment.batching.max_queue_size} }} }}\n"
    )
    return render(ENGINE, variant_name(deployment.engine.kind, deployment.decoupled)) + queue + entries


def environment(deployment: Deployment) -> dict[str, str]:
    """Return what the server's environment needs: an engine of several ranks has a process started for each."""
    return {"TRTLLM_ORCHESTRATOR": "1"} if _ranks(deployment) > 1 else {}


def parameters(deployment: Deployment) -> dict[str, str]:
    """Return the backend's parameters: what the deployment implies, then ``tensorrt_llm.parameters`` over it.

    Raises:
        DeploymentError: see ``engine_pbtxt``.
    """
    settings, cache = deployment.tensorrt_llm, deployment.kv_cache
    drafts = _drafts(deployment.speculation)
    engine = agreed_engine(deployment)
    values: dict[str, Any] = {
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "executor_worker_path": _WORKER,
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": engine.directory,
        "max_beam_width": 1,
        "batch_scheduler_policy": deployment.batching.policy,
        "kv_cache_free_gpu_mem_fraction": settings.free_gpu_memory_fraction,
        "max_tokens_in_paged_kv_cache": cache.tokens,
        "kv_cache_host_memory_bytes": settings.host_cache_bytes,
        "enable_kv_cache_reuse": engine.reuses_prefixes(deployment),
        "enable_chunked_context": engine.attends_to_cached_blocks,
        "exclude_input_in_output": False,
        "normalize_log_probs": False,
        "gpu_device_ids": ",".join(map(str, range(_ranks(deployment)))),
        # These three must be there even where nothing is guided: the backend does not load without them.
        "tokenizer_dir": "",
        "guided_decoding_backend": "",
        "xgrammar_tokenizer_info_path": "",
    }
    written = {name: _written(value) for name, value in (values | drafts).items() if value is not None}
    return written | _checked(settings.parameters)


def _ranks(deployment: Deployment) -> int:
    return deployment.tensorrt_llm.tensor_parallel_size * deployment.tensorrt_llm.pipeline_parallel_size


def _drafts(drafts: SpeculationSettings) -> dict[str, Any]:
    match drafts.method:
        case "lookahead":
            return {
                "decoding_mode": "lookahead",
                "lookahead_window_size": drafts.window_size,
                "lookahead_ngram_size": drafts.max_ngram_size,
                "lookahead_verification_set_size": drafts.verification_set_size,
            }
        case "medusa" | "eagle" as method:
            paths = draft_tree(drafts).paths
            choices = paths and ", ".join("{" + ", ".join(map(str, path)) + "}" for path in paths)
            return {"decoding_mode": method, f"{method}_choices": choices}
        case None:
            return {}
        case method:
            raise DeploymentError(
                f"speculation.method {method} needs `engine.kind: trtllm`; upstream's backend has none"
            )


def _checked(given: dict[str, str]) -> dict[str, str]:
    """Return the overrides; upstream takes no notice of an unknown name, nor of most wrong values."""
    for name, value in given.items():
        if name not in KINDS:
            raise DeploymentError(f"tensorrt_llm.parameters: unknown name {name!r}{nearest(name, KINDS)}")
        if not _reads(KINDS[name], value):
            kind = KINDS[name]
            allowed = kind if isinstance(kind, str) else " or ".join(repr(one) for one in kind)
            raise DeploymentError(f"tensorrt_llm.parameters: {name} is {value!r}; it must be {allowed}")
    return given


def _reads(kind: str | tuple[str, ...], value: str) -> bool:
    match kind:
        case tuple():
            return value in kind
        case "bool":
            return value in _TRUE + _FALSE
        case "int":
            return value.isdigit()
        case "float":
            return value.replace(".", "", 1).isdigit()
    return True


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(text: str) -> str:
    """Return a pbtxt string; its escapes are C's, and JSON's for all but control characters are the same."""
    return json.dumps(text, ensure_ascii=False)
