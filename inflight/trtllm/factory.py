"""Makes the engine of a deployment on TensorRT-LLM, and the arguments of each of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from inflight.deployment import Deployment
from inflight.engine.request import Request
from inflight.errors import DeploymentError, InflightError
from inflight.text.tokenizer import Tokenizer
from inflight.trtllm import sampling
from inflight.trtllm.api import find, leave_mpi_job, make_llm, require_tensorrt_llm
from inflight.trtllm.engine import TrtLlmEngine
from inflight.trtllm.retention import retention_arguments
from inflight.trtllm.runtime import Runtime
from inflight.trtllm.stops import single_stop_tokens
from inflight.trtllm.watchdog import Watchdog


def make_engine(deployment: Deployment, tokenizer: Tokenizer, on_death: Callable[[], object]) -> TrtLlmEngine:
    """Return the engine, loaded and warmed up.

    Args:
        deployment: its ``engine.kind`` is ``trtllm``.
        tokenizer: of its checkpoint.
        on_death: called when an engine that had started is dead and its requests have failed.

    Raises:
        DeploymentError: in one line, for whatever keeps it from being served.
    """
    leave_mpi_job()
    require_tensorrt_llm()
    request_error = find("llmapi", "RequestError")
    started = time.perf_counter()
    runtime = Runtime(make_llm(deployment), request_error)
    loaded = time.perf_counter()
    try:
        watchdog = Watchdog(deployment.tensorrt_llm.watchdog_s, deployment.start_timeout_s, on_death)
        arguments = RequestArguments(deployment, tokenizer)
        engine = TrtLlmEngine(deployment, tokenizer, runtime, arguments.of, watchdog)
        engine.warm_up()
        engine.stats.start_phases["load"] = loaded - started
    except BaseException as error:
        runtime.close()
        if isinstance(error, InflightError) and not isinstance(error, DeploymentError):
            raise DeploymentError(f"the first generation of TensorRT-LLM failed: {error}") from error
        raise
    return engine


class RequestArguments:
    """Makes the arguments of ``generate_async``."""

    def __init__(self, deployment: Deployment, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Ids begin at 1, as in TensorRT-LLM's own examples.
        self._adapters = {
            name: find("executor", "LoRARequest")(name, number, str(path))
            for number, (name, path) in enumerate(deployment.tensorrt_llm.lora.items(), start=1)
        }

    def of(self, request: Request) -> dict[str, Any]:
        """Return them for one request, but for ``streaming``."""
        stops = single_stop_tokens(request.sampling, self._tokenizer)
        arguments = sampling.sampling_arguments(request.sampling, self._tokenizer.config.vocab_size, stops)
        if request.sampling.guide is not None:
            guide = find("llmapi", "GuidedDecodingParams")
            arguments["guided_decoding"] = guide(**sampling.guide_arguments(request.sampling.guide))
        params = find("llmapi", "SamplingParams")(**arguments)
        sampling.set_bad_words(params, request.sampling.bad_sequences)
        made: dict[str, Any] = {"inputs": request.prompt, "sampling_params": params}
        if request.retention:
            made["kv_cache_retention_config"] = _retention_config(request)
        return made | ({"lora_request": self._adapters[request.lora]} if request.lora else {})


def _retention_config(request: Request) -> Any:
    config = find("llmapi", "KvCacheRetentionConfig")
    ranges, others = retention_arguments(request.retention, len(request.prompt))
    return config([config.TokenRangeRetentionConfig(**one) for one in ranges], **others)
