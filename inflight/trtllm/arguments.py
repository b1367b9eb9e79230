"""The arguments of TensorRT-LLM's ``LLM(...)`` that a deployment implies, as plain data.

Everything is decided here, without TensorRT-LLM: ``inflight build --dry-run`` shows the same arguments on any machine.
``classes`` turns them into what the API takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from inflight.compiled_engine import CompiledEngine, agreed_engine, read_engine
from inflight.deployment import Deployment
from inflight.errors import DeploymentError
from inflight.speculation import draft_tree
from inflight.text.checkpoint import read_json

Sampler = Literal["torch", "trtllm", "tensorrt"]
"""What draws the tokens: a sampler of the PyTorch flow, or the compiled engine's own."""

_POLICIES = {"guaranteed_no_evict": "GUARANTEED_NO_EVICT", "max_utilization": "MAX_UTILIZATION"}
_SAMPLER_TYPES = {"torch": "TorchSampler", "trtllm": "TRTLLMSampler"}
_DECODING_CONFIGS = {
    "draft_target": "DraftTargetDecodingConfig",
    "eagle": "EagleDecodingConfig",
    "medusa": "MedusaDecodingConfig",
    "lookahead": "LookaheadDecodingConfig",
    "ngram": "NGramDecodingConfig",
}
"""Method to its class in ``llmapi``."""
_OWN_MAX_BATCH_SIZE = 2048
"""Default of ``LLM``'s ``max_batch_size``."""
_FLOWS_OF_METHOD = {
    "draft_target": ("pytorch",),
    "ngram": ("pytorch",),
    "eagle": ("pytorch", "tensorrt"),
    "medusa": ("tensorrt",),
    "lookahead": ("tensorrt",),
}
"""Which of the flows of TensorRT-LLM 1.2.x has a method of speculative decoding."""


def flow(deployment: Deployment) -> Literal["pytorch", "tensorrt"]:
    """Return TensorRT-LLM's flow: a compiled engine, or PyTorch on the checkpoint."""
    return "pytorch" if deployment.tensorrt_llm.engine_dir is None else "tensorrt"


def sampler(deployment: Deployment) -> Sampler:
    """Return what will draw the tokens."""
    if flow(deployment) == "tensorrt":
        return "tensorrt"
    return "torch" if deployment.speculation.method else deployment.tensorrt_llm.sampler


def llm_arguments(deployment: Deployment) -> dict[str, Any]:
    """Return the keyword arguments of ``LLM``; nested configurations are dictionaries, paths are strings.

    Raises:
        DeploymentError: names a setting that TensorRT-LLM 1.2.x does not have, and what to use in its place.
    """
    settings = deployment.tensorrt_llm
    drafts = _speculation(deployment)
    engine = agreed_engine(deployment) if flow(deployment) == "tensorrt" else None
    arguments: dict[str, Any] = {
        "model": str(engine.directory if engine else deployment.model),
        "skip_tokenizer_init": settings.guided_decoding is None,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "kv_cache_config": _kv_cache(deployment, engine),
        "scheduler_config": {"capacity_scheduler_policy": _POLICIES[deployment.batching.policy]},
        **_sizes(deployment, engine),
        "max_seq_len": max_sequence_length(deployment),
        "enable_chunked_prefill": engine is None or engine.attends_to_cached_blocks,
        "return_perf_metrics": True,
    }
    if settings.guided_decoding is not None:
        arguments |= {"guided_decoding_backend": settings.guided_decoding, "tokenizer": str(deployment.model)}
    if settings.lora:
        arguments |= {"enable_lora": True, "lora_config": _lora(deployment)}
    if drafts is not None:
        arguments["speculative_config"] = drafts
    return arguments | (_pytorch_flow(deployment) if engine is None else _tensorrt_flow(deployment))


def max_batch_size(deployment: Deployment) -> int:
    """Return how many sequences run at once: as the deployment says, or the engine, or else TensorRT-LLM itself."""
    if "max_batch_size" in deployment.batching.model_fields_set:
        return deployment.batching.max_batch_size
    return read_engine(deployment).build["max_batch_size"] if flow(deployment) == "tensorrt" else _OWN_MAX_BATCH_SIZE


def max_sequence_length(deployment: Deployment) -> int:
    """Return how many tokens prompt and output may have: the deployment's limit within the model's or the engine's.

    Raises:
        DeploymentError: neither says.
    """
    limits = [deployment.limits.max_sequence_length, _own_limit(deployment), deployment.kv_cache.tokens]
    known = [limit for limit in limits if limit is not None]
    if not known:
        raise DeploymentError(f"{deployment.model} does not say how long a sequence may be; set max_sequence_length")
    return min(known)


def build_config(deployment: Deployment) -> Mapping[str, Any]:
    """Return what the compiled engine was built with.

    Raises:
        DeploymentError: ``tensorrt_llm.engine_dir`` is not an engine's directory.
    """
    return read_engine(deployment).build


def _sizes(deployment: Deployment, engine: CompiledEngine | None) -> dict[str, Any]:
    """Return the sizes that are set: the defaults of a deployment are the portable engine's."""
    batching, given = deployment.batching, deployment.batching.model_fields_set
    names = {"max_batch_size": "max_batch_size", "max_num_tokens": "max_tokens_per_step"}
    if engine is not None:
        return {name: engine.build[name] for name in names}
    return {name: getattr(batching, key) for name, key in names.items() if key in given}


def _own_limit(deployment: Deployment) -> int | None:
    if flow(deployment) == "tensorrt":
        limit = build_config(deployment).get("max_seq_len")
    else:
        config = read_json(deployment.model / "config.json")
        limit = {**config, **config.get("text_config", {})}.get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def _kv_cache(deployment: Deployment, engine: CompiledEngine | None) -> dict[str, Any]:
    cache, settings = deployment.kv_cache, deployment.tensorrt_llm
    config: dict[str, Any] = {
        "enable_block_reuse": cache.prefix_reuse if engine is None else engine.reuses_prefixes(deployment),
        "free_gpu_memory_fraction": settings.free_gpu_memory_fraction,
    }
    if cache.tokens is not None:
        config["max_tokens"] = cache.tokens
    if settings.host_cache_bytes:
        config["host_cache_size"] = settings.host_cache_bytes
    if engine is not None:
        return config
    if "block_size" in cache.model_fields_set:  # TensorRT-LLM's own default is another one than the portable engine's
        if cache.block_size & (cache.block_size - 1):
            raise DeploymentError(f"kv_cache.block_size is {cache.block_size}; TensorRT-LLM takes powers of two")
        config["tokens_per_block"] = cache.block_size
    return config | {"dtype": cache.dtype}


def _pytorch_flow(deployment: Deployment) -> dict[str, Any]:
    settings, sizes = deployment.tensorrt_llm, deployment.tensorrt_llm.cuda_graph_batch_sizes
    arguments: dict[str, Any] = {
        "dtype": deployment.engine.dtype,
        "sampler_type": _SAMPLER_TYPES[sampler(deployment)],
        "enable_iter_perf_stats": True,
    }
    if deployment.speculation.method and "sampler" in settings.model_fields_set and settings.sampler != "torch":
        raise DeploymentError("tensorrt_llm.sampler is trtllm, which TensorRT-LLM 1.2 lacks beside speculation")
    if sizes is not None:
        most = max_batch_size(deployment)
        if not sizes or not all(1 <= size <= most for size in sizes):
            raise DeploymentError(
                f"tensorrt_llm.cuda_graph_batch_sizes is {sizes}; each must be between 1 and batching.max_batch_size, "
                f"{most}"
            )
        arguments["cuda_graph_config"] = {"batch_sizes": sorted(sizes), "enable_padding": True}
    return arguments


def _tensorrt_flow(deployment: Deployment) -> dict[str, Any]:
    if deployment.tensorrt_llm.guided_decoding == "llguidance":
        raise DeploymentError("tensorrt_llm.guided_decoding is llguidance; a compiled engine has xgrammar only")
    return {"gather_generation_logits": True}


def _speculation(deployment: Deployment) -> dict[str, Any] | None:
    """Return the configuration of the drafts; ``class`` names what it is for."""
    speculation, here = deployment.speculation, flow(deployment)
    method = speculation.method
    if method is None:
        return None
    if here not in _FLOWS_OF_METHOD[method]:
        others = ", ".join(name for name, flows in _FLOWS_OF_METHOD.items() if here in flows)
        where = "the PyTorch flow" if here == "pytorch" else "compiled engines"
        raise DeploymentError(f"speculation.method is {method}, which TensorRT-LLM 1.2 lacks in {where}; use {others}")
    config: dict[str, Any] = {"class": _DECODING_CONFIGS[method]}
    if method == "lookahead":
        return config | {
            "max_window_size": speculation.window_size,
            "max_ngram_size": speculation.max_ngram_size,
            "max_verification_set_size": speculation.verification_set_size,
        }
    config["max_draft_len"] = speculation.max_draft_tokens
    if method == "ngram":
        return config | {"max_matching_ngram_size": speculation.max_ngram_size}
    config["speculative_model_dir"] = str(speculation.draft_model)
    return config | (_tree(deployment) if here == "tensorrt" else {})


def _tree(deployment: Deployment) -> dict[str, Any]:
    """Return the tree that the engine was built for; upstream's own goes without paths."""
    method, tree = deployment.speculation.method, draft_tree(deployment.speculation)
    paths = {} if tree.paths is None else {f"{method}_choices": [list(path) for path in tree.paths]}
    if method == "medusa":
        return paths | {"num_medusa_heads": deployment.speculation.medusa_heads}
    inner = tree.most_inner_nodes_of_a_layer
    return paths | {"num_eagle_layers": tree.depth, "max_non_leaves_per_layer": inner}


def _lora(deployment: Deployment) -> dict[str, Any]:
    """Return the configuration of the adapters' cache: all fit. The first adapter says for all what they adapt."""
    settings = deployment.tensorrt_llm
    return {
        "lora_dir": [str(next(iter(settings.lora.values())))],
        "max_lora_rank": _max_lora_rank(deployment),
        "max_loras": len(settings.lora),
        "max_cpu_loras": len(settings.lora),
    }


def _max_lora_rank(deployment: Deployment) -> int:
    compiled = read_engine(deployment).max_lora_rank if flow(deployment) == "tensorrt" else None
    return compiled or deployment.tensorrt_llm.max_lora_rank


def check_adapters(deployment: Deployment) -> None:
    """Check that the LoRA adapters are there and alike.

    Raises:
        DeploymentError: names the adapter and what is wrong with it.
    """
    settings, most = deployment.tensorrt_llm, _max_lora_rank(deployment)
    targets: dict[str, str] = {}
    for name, path in settings.lora.items():
        config = read_json(path / "adapter_config.json")
        rank = config.get("r")
        if not isinstance(rank, int) or rank > most:
            raise DeploymentError(f"tensorrt_llm.lora.{name} has rank {rank}; max_lora_rank is {most}")
        modules = config.get("target_modules")
        targets[name] = json.dumps(sorted(modules) if isinstance(modules, list) else modules)
    if len(set(targets.values())) > 1:
        raise DeploymentError(f"tensorrt_llm.lora: the adapters must adapt the same modules; they adapt {targets}")
