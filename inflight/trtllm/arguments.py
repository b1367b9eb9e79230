"""The arguments of TensorRT-LLM's ``LLM(...)`` that a deployment implies, as plain data: its PyTorch flow.

Everything is decided here, without TensorRT-LLM: ``inflight build --dry-run`` shows the same arguments on any machine.
``factory.classes`` turns them into what the API takes. What TensorRT-LLM 1.2 would misread of the deployment's files is
refused here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from inflight.errors import DeploymentError
from inflight.settings.batching import TENSORRT_LLM_SEQUENCES
from inflight.settings.deployment import Deployment
from inflight.text.files import read_json

Sampler = Literal["torch", "trtllm"]
"""The sampler that draws the tokens."""

_SAMPLER_TYPES = {"torch": "TorchSampler", "trtllm": "TRTLLMSampler"}
_DECODING_CONFIGS = {
    "draft_target": "DraftTargetDecodingConfig",
    "eagle": "EagleDecodingConfig",
    "ngram": "NGramDecodingConfig",
}
"""Method to its class in ``llmapi``."""
_SAMPLER_BUFFERS = 5
"""The trtllm sampler has so many buffers, each of 4 bytes per sequence and position: ids, log-probs, parents, and two
of indirections."""
_OWN_ROPE = {"rope_theta": 10_000, "partial_rotary_factor": 1}
"""The values that transformers 4.57, with which TensorRT-LLM 1.2 reads, takes where ``config.json`` has no such key."""


def sampler(deployment: Deployment) -> Sampler:
    """Return what will draw the tokens."""
    return "torch" if deployment.speculation.method else deployment.tensorrt_llm.sampler


def llm_arguments(deployment: Deployment) -> dict[str, Any]:
    """Return the keyword arguments of ``LLM``; nested configurations are dictionaries, paths are strings.

    Raises:
        DeploymentError: names a setting that TensorRT-LLM 1.2.x does not have, and what to use in its place.
    """
    settings, batching = deployment.tensorrt_llm, deployment.batching
    arguments: dict[str, Any] = {
        "model": str(deployment.model),
        "dtype": deployment.engine.dtype,
        "skip_tokenizer_init": settings.guided_decoding is None,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "kv_cache_config": _kv_cache(deployment),
        "scheduler_config": {"capacity_scheduler_policy": batching.policy.upper()},
        "max_batch_size": max_batch_size(deployment),
        "max_seq_len": max_sequence_length(deployment),
        "enable_chunked_prefill": True,
        "sampler_type": _SAMPLER_TYPES[sampler(deployment)],
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
    }
    if "max_tokens_per_step" in batching.model_fields_set:  # the default is the portable engine's
        arguments["max_num_tokens"] = batching.max_tokens_per_step
    if settings.guided_decoding is not None:
        arguments |= {"guided_decoding_backend": settings.guided_decoding, "tokenizer": str(deployment.model)}
    if settings.lora:
        arguments |= {
            "enable_lora": True,
            "lora_config": {
                "lora_dir": [str(next(iter(settings.lora.values())))],  # it says for all what they adapt
                "max_lora_rank": settings.max_lora_rank,
                "max_loras": len(settings.lora),
                "max_cpu_loras": len(settings.lora),
            },
        }
    return arguments | _cuda_graphs(deployment) | _speculation(deployment)


def max_batch_size(deployment: Deployment) -> int:
    """Return how many sequences a step computes at most."""
    given = "max_batch_size" in deployment.batching.model_fields_set
    return deployment.batching.max_batch_size if given else TENSORRT_LLM_SEQUENCES


def max_open_requests(deployment: Deployment) -> int:
    """Return how many requests TensorRT-LLM works on at once: each stage of a pipeline has a batch of its own."""
    return max_batch_size(deployment) * deployment.tensorrt_llm.pipeline_parallel_size


def max_sequence_length(deployment: Deployment) -> int:
    """Return how many tokens prompt and output may have: the deployment's limit within the model's.

    Raises:
        DeploymentError: neither says.
    """
    limits = [deployment.limits.max_sequence_length, _own_limit(deployment), deployment.kv_cache.tokens]
    known = [limit for limit in limits if limit is not None]
    if not known:
        raise DeploymentError(f"{deployment.model} does not say how long a sequence may be; set max_sequence_length")
    return min(known)


def sizes_in_words(deployment: Deployment) -> str:
    """Return the sizes that are served, where they come from, and what they cost, for the log."""
    batch, length = max_batch_size(deployment), max_sequence_length(deployment)
    text = f"TensorRT-LLM runs {batch} sequences of up to {length:,} tokens at once"
    if deployment.limits.max_sequence_length is None and length == _own_limit(deployment):
        text += ", the model's own limit; set limits.max_sequence_length to what is needed"
    if sampler(deployment) == "trtllm":
        size = _SAMPLER_BUFFERS * 4 * max_open_requests(deployment) * length
        text += f"; the buffers of the trtllm sampler take about {size / 1e9:.2f} GB for that"
    return text


def _own_limit(deployment: Deployment) -> int | None:
    config = read_json(deployment.model / "config.json")
    limit = {**config, **_text_part(config)}.get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what ``config.json`` says of the language model apart from other parts; files write null for nothing."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else {}


def _kv_cache(deployment: Deployment) -> dict[str, Any]:
    cache, settings = deployment.kv_cache, deployment.tensorrt_llm
    config: dict[str, Any] = {
        "enable_block_reuse": cache.prefix_reuse,
        "free_gpu_memory_fraction": settings.free_gpu_memory_fraction,
        "dtype": cache.dtype,
    }
    if cache.tokens is not None:
        config["max_tokens"] = cache.tokens
    if settings.host_cache_bytes:
        config["host_cache_size"] = settings.host_cache_bytes
    if "block_size" in cache.model_fields_set:  # TensorRT-LLM's own default is another one than the portable engine's
        if cache.block_size & (cache.block_size - 1):
            raise DeploymentError(f"kv_cache.block_size is {cache.block_size}; TensorRT-LLM takes powers of two")
        config["tokens_per_block"] = cache.block_size
    return config


def _cuda_graphs(deployment: Deployment) -> dict[str, Any]:
    """Return the configuration of CUDA graphs, where it is not TensorRT-LLM's own; None switches them off.

    A graph replays what it was captured with, adapters included: 1.2 is not known to compute them right in one.
    """
    key, sizes = "tensorrt_llm.cuda_graph_batch_sizes", deployment.tensorrt_llm.cuda_graph_batch_sizes
    if deployment.tensorrt_llm.lora:
        if sizes is not None:
            raise DeploymentError(f"{key}: CUDA graphs are off beside tensorrt_llm.lora; leave it out")
        return {"cuda_graph_config": None}
    if sizes is None:
        return {}
    most = max_batch_size(deployment)
    if not sizes or not all(1 <= size <= most for size in sizes):
        raise DeploymentError(f"{key} is {sizes}; each must be between 1 and batching.max_batch_size, {most}")
    return {"cuda_graph_config": {"batch_sizes": sorted(sizes), "enable_padding": True}}


def _speculation(deployment: Deployment) -> dict[str, Any]:
    """Return the configuration of the drafts, if there are any; ``class`` names what it is for."""
    speculation, settings = deployment.speculation, deployment.tensorrt_llm
    if (method := speculation.method) is None:
        return {}
    if "sampler" in settings.model_fields_set and settings.sampler != "torch":
        raise DeploymentError("tensorrt_llm.sampler is trtllm, which TensorRT-LLM 1.2 lacks beside speculation")
    config: dict[str, Any] = {"class": _DECODING_CONFIGS[method], "max_draft_len": speculation.max_draft_tokens}
    if method == "ngram":
        config["max_matching_ngram_size"] = speculation.max_ngram_size
    else:
        config["speculative_model_dir"] = str(speculation.draft_model)
    return {"speculative_config": config}


def check_adapters(deployment: Deployment) -> None:
    """Check that the LoRA adapters are there and alike.

    Raises:
        DeploymentError: names the adapter and what is wrong with it.
    """
    settings = deployment.tensorrt_llm
    targets: dict[str, str] = {}
    for name, path in settings.lora.items():
        config = read_json(path / "adapter_config.json")
        rank = config.get("r")
        if not isinstance(rank, int) or rank > settings.max_lora_rank:
            most = settings.max_lora_rank
            raise DeploymentError(f"tensorrt_llm.lora.{name} has rank {rank}; max_lora_rank is {most}")
        modules = config.get("target_modules")
        targets[name] = json.dumps(sorted(modules) if isinstance(modules, list) else modules)
    if len(set(targets.values())) > 1:
        raise DeploymentError(f"tensorrt_llm.lora: the adapters must adapt the same modules; they adapt {targets}")


def check_positions(checkpoint: Path) -> None:
    """Check that TensorRT-LLM reads the positions' encoding of a checkpoint as it was written.

    transformers 5 writes it as ``rope_parameters``, and 4.57 takes no notice of that key: it would compute with its own
    default, and the text would be wrong without a word.

    Raises:
        DeploymentError: names the keys that are missing.
    """
    path = checkpoint / "config.json"
    config = read_json(path)
    for part in (config, _text_part(config)):
        if lost := list(misread(part)):
            raise DeploymentError(
                f"{path} has {', '.join(lost)} in rope_parameters alone; transformers 4.57, with which "
                "TensorRT-LLM 1.2 reads it, knows rope_theta, partial_rotary_factor and rope_scaling alone: write "
                "them beside it, or take the original checkpoint's config.json"
            )


def misread(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what ``rope_parameters`` of a ``config.json`` says otherwise than what 4.57 would make of the rest."""
    written = config.get("rope_parameters")
    if not isinstance(written, Mapping):
        return
    by_layer = [layer for layer in written.values() if isinstance(layer, Mapping)]
    for layer in by_layer or [written]:
        for name, own in _OWN_ROPE.items():
            if name not in config and (value := layer.get(name, own)) != own:
                yield f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {json.dumps(value)}"
        kind = layer.get("rope_type", "default")
        if not config.get("rope_scaling") and kind != "default":
            yield f"rope_type {kind}"
