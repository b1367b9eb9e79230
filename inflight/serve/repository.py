"""The model repository that a server is started on: the static one, in the variant that the deployment asks for.

A variant is a name of Triton's ``--model-config-name``. A model that differs in it has a file of that name in its
folder ``configs``. Upstream's C++ backend, ``tensorrtllm``, has parameters besides, all from the deployment. What it
would take no notice of is refused: a setting that the engine fixes otherwise, an unknown parameter, most wrong values.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from inflight.compiled_engine import agreed_engine
from inflight.contract import ENGINE, MAX_BATCH_SIZE, TENSORRTLLM, TRTLLM
from inflight.errors import DeploymentError, nearest
from inflight.settings.deployment import Deployment
from inflight.settings.speculation import SpeculationSettings, draft_tree

DEFAULT_VARIANT = "config"
"""The variant in ``config.pbtxt``: streaming, on the portable engine."""
_WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"

_NAMES_OF_KINDS = {
    "int": "max_beam_width max_tokens_in_paged_kv_cache sink_token_length kv_cache_host_memory_bytes num_nodes "
    "cancellation_check_period_ms stats_check_period_ms iter_stats_max_iterations request_stats_max_iterations "
    "lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_host_memory_bytes lookahead_window_size "
    "lookahead_ngram_size lookahead_verification_set_size cuda_graph_cache_size recv_poll_period_ms",
    "float": "kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction lora_cache_gpu_memory_fraction "
    "gpu_weights_percent",
    "bool": "kv_cache_onboard_blocks exclude_input_in_output enable_kv_cache_reuse normalize_log_probs "
    "enable_chunked_context enable_context_fmha_fp32_acc multi_block_mode cuda_graph_mode "
    "speculative_decoding_fast_logits",
    "text": "gpt_model_path encoder_model_path max_attention_window_size gpu_device_ids participant_ids "
    "lora_prefetch_dir executor_worker_path medusa_choices eagle_choices tokenizer_dir xgrammar_tokenizer_info_path",
}
_WRITTEN = {
    "int": re.compile(r"\d+"),
    "float": re.compile(r"\d+\.?\d*|\.\d+"),
    "bool": re.compile("True|true|TRUE|1|False|false|FALSE|0"),
    "text": re.compile(".*", re.DOTALL),
}
"""How a value of each kind is written for the backend to read it."""
KINDS: dict[str, str | tuple[str, ...]] = {
    **{name: kind for kind, names in _NAMES_OF_KINDS.items() for name in names.split()},
    "FORCE_CPU_ONLY_INPUT_TENSORS": ("no",),
    "gpt_model_type": ("V1", "v1", "inflight_batching", "inflight_fused_batching"),
    "batch_scheduler_policy": ("guaranteed_no_evict", "max_utilization"),
    "decoding_mode": ("top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle"),
    "guided_decoding_backend": ("", "xgrammar"),
}
"""Parameters of upstream's backend, and how it reads each; a tuple: the values that it knows."""


def variant_name(kind: str, decoupled: bool) -> str:
    """Return the variant of the model repository for ``engine.kind`` and ``decoupled`` of a deployment."""
    engine = [kind] if kind in (TRTLLM, TENSORRTLLM) else []
    return "_".join([*engine, *([] if decoupled else ["unary"])]) or DEFAULT_VARIANT


def prepare_repository(static: Path, deployment: Deployment, directory: Path) -> Path:
    """Make the repository to serve at ``directory``, and return it.

    It is a link to the static one, whose own path may have spaces and characters that are not ASCII: what names it to
    Triton's stages allows neither. For upstream's C++ backend it is a folder of links beside the engine's model, whose
    static file is completed by the backend's parameters, which depend on the deployment.

    Raises:
        DeploymentError: there is no engine, it was compiled with other settings, or a parameter is unknown.
    """
    if deployment.engine.kind != TENSORRTLLM:
        directory.symlink_to(static.resolve())
        return directory
    engine = directory / ENGINE
    (engine / "1").mkdir(parents=True)
    tensors = static / ENGINE / "configs" / f"{variant_name(TENSORRTLLM, deployment.decoupled)}.pbtxt"
    text = (
        f"{tensors.read_text(encoding='utf-8')}dynamic_batching {{ preferred_batch_size: [ {MAX_BATCH_SIZE} ] "
        "max_queue_delay_microseconds: 0 "
        f"default_queue_policy: {{ max_queue_size: {deployment.batching.max_queue_size} }} }}\n"
    )
    for key, value in parameters(deployment).items():
        # A pbtxt string's escapes are C's, and JSON's for all but control characters are the same.
        name, written = json.dumps(key, ensure_ascii=False), json.dumps(value, ensure_ascii=False)
        text += f"parameters {{ key: {name} value: {{ string_value: {written} }} }}\n"
    (engine / "config.pbtxt").write_text(text, encoding="utf-8")
    for model in static.iterdir():
        if model.is_dir() and model.name != ENGINE:
            (directory / model.name).symlink_to(model.resolve())
    return directory


def orchestrator_environment(deployment: Deployment) -> dict[str, str]:
    """Return what the server's environment needs: an engine of several ranks has a process started for each."""
    return {"TRTLLM_ORCHESTRATOR": "1"} if deployment.tensorrt_llm.ranks > 1 else {}


def parameters(deployment: Deployment) -> dict[str, str]:
    """Return the backend's parameters: what the deployment implies, then ``tensorrt_llm.parameters`` over it.

    Raises:
        DeploymentError: see ``prepare_repository``.
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
        "enable_kv_cache_reuse": cache.prefix_reuse and engine.attends_to_cached_blocks,
        "enable_chunked_context": engine.attends_to_cached_blocks,
        "exclude_input_in_output": False,
        "normalize_log_probs": False,
        "gpu_device_ids": ",".join(map(str, range(settings.ranks))),
        # These three must be there even where nothing is guided: the backend does not load without them.
        "tokenizer_dir": "",
        "guided_decoding_backend": "",
        "xgrammar_tokenizer_info_path": "",
    }
    written = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in (values | drafts).items()
        if value is not None
    }
    for name, value in settings.parameters.items():  # upstream takes no notice of an unknown name, or a wrong value
        if name not in KINDS:
            raise DeploymentError(f"tensorrt_llm.parameters: unknown name {name!r}{nearest(name, KINDS)}")
        kind = KINDS[name]
        is_read = value in kind if isinstance(kind, tuple) else _WRITTEN[kind].fullmatch(value)
        if not is_read:
            allowed = kind if isinstance(kind, str) else " or ".join(map(repr, kind))
            raise DeploymentError(f"tensorrt_llm.parameters: {name} is {value!r}; it must be {allowed}")
    return written | settings.parameters


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
