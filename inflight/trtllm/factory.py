"""Makes the engine of a deployment on TensorRT-LLM: it looks whether that is there, and of a line that is served."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from inflight.engine.models.reading import architecture_name
from inflight.errors import DeploymentError, InflightError
from inflight.manifest import TENSORRT_LLM_IMAGE, TENSORRT_LLM_LINE
from inflight.settings.deployment import Deployment
from inflight.text.files import read_json
from inflight.text.tokenizer import Tokenizer
from inflight.trtllm.arguments import check_adapters, check_positions, llm_arguments, sizes_in_words
from inflight.trtllm.engine import TrtLlmEngine
from inflight.trtllm.models import why_not_named
from inflight.trtllm.request_arguments import RequestArguments
from inflight.trtllm.runtime import Runtime, find
from inflight.trtllm.watchdog import Watchdog

log = logging.getLogger(__name__)

_CONFIG_CLASSES = {
    "kv_cache_config": ("llmapi", "KvCacheConfig"),
    "cuda_graph_config": ("llmapi", "CudaGraphConfig"),
    "scheduler_config": ("llmapi", "SchedulerConfig"),
    "lora_config": ("lora_helper", "LoraConfig"),
}
"""Keyword of ``LLM`` to the module and the class of its value."""
_MPI_JOB = ("OMPI_COMM_WORLD_", "OMPI_MCA_orte_", "PMIX_", "PMI_")
"""The prefixes of the variables by which ``mpirun`` and ``srun`` tell a process which rank of a job it is."""


def make_engine(deployment: Deployment, tokenizer: Tokenizer, on_death: Callable[[], object]) -> TrtLlmEngine:
    """Return the engine, loaded and warmed up.

    ``on_death`` is called when an engine that had started is dead and its requests have failed.

    Raises:
        DeploymentError: in one line, for whatever keeps it from being served.
    """
    leave_mpi_job()
    _require_tensorrt_llm()
    request_error = find("llmapi", "RequestError")
    started = time.perf_counter()
    runtime = Runtime(_make_llm(deployment), request_error)
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


def leave_mpi_job() -> None:
    """Forget that this process is a rank of an MPI job, as upstream's own backend does: TensorRT-LLM starts its own.

    To be called before ``tensorrt_llm`` is imported, which starts MPI.
    """
    for name in [name for name in os.environ if name.startswith(_MPI_JOB)]:
        del os.environ[name]


def _require_tensorrt_llm() -> None:
    try:
        package = importlib.import_module("tensorrt_llm")
    except Exception as error:  # its native libraries raise much beside ImportError
        advice = f"use the image {TENSORRT_LLM_IMAGE}"
        raise DeploymentError(f"tensorrt_llm cannot be imported ({_one_line(error)}); {advice}") from error
    version = str(package.__version__)
    if version.split(".")[:2] != TENSORRT_LLM_LINE.split("."):
        raise DeploymentError(
            f"TensorRT-LLM {version} is installed, {TENSORRT_LLM_LINE}.x is served; use the image {TENSORRT_LLM_IMAGE}"
        )


def _make_llm(deployment: Deployment) -> Any:
    arguments = llm_arguments(deployment)
    check_adapters(deployment)
    for checkpoint in (deployment.model, deployment.speculation.draft_model):
        if checkpoint is not None:
            check_positions(checkpoint)
    settings = deployment.tensorrt_llm
    needed = settings.ranks
    found = find("llmapi.utils", "get_device_count")()
    if found < needed:
        sizes = f"tensor_parallel_size {settings.tensor_parallel_size} x {settings.pipeline_parallel_size} stages"
        raise DeploymentError(f"tensorrt_llm: {sizes} needs {needed} GPUs, here are {found}")
    log.info("%s", sizes_in_words(deployment))
    if settings.lora:
        log.info("CUDA graphs are off beside LoRA adapters: decoding is slower")
    try:
        return find("llmapi", "LLM")(**classes(arguments))
    except Exception as error:
        log.exception("TensorRT-LLM could not be started with %s", arguments)
        config = read_json(deployment.model / "config.json")
        code = "the checkpoint brings code of its own (auto_map in its config.json), which is not run here: "
        unlisted = why_not_named(architecture_name(config))
        cause = (code if "auto_map" in config else f"{unlisted}: " if unlisted else "") + _one_line(error)
        raise DeploymentError(f"TensorRT-LLM cannot serve this deployment: {cause}") from error


def classes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ``llm_arguments`` with the API's own classes in place of the nested dictionaries."""
    made = dict(arguments)
    for name, (module, class_name) in _CONFIG_CLASSES.items():
        if made.get(name) is not None:
            config = dict(made[name])
            if policy := config.get("capacity_scheduler_policy"):
                config["capacity_scheduler_policy"] = find("llmapi", "CapacitySchedulerPolicy")[policy]
            made[name] = find(module, class_name)(**config)
    if "speculative_config" in made:
        config = dict(made["speculative_config"])
        made["speculative_config"] = find("llmapi", config.pop("class"))(**config)
    return made


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
