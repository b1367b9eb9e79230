"""The only place that imports TensorRT-LLM: whether it is there, of a line that is served; and ``LLM(...)``."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from inflight.deployment import Deployment
from inflight.errors import DeploymentError
from inflight.manifest import TENSORRT_LLM_IMAGE, TENSORRT_LLM_LINE
from inflight.trtllm.arguments import llm_arguments, sizes_in_words
from inflight.trtllm.checks import brings_code, check_adapters, check_positions

log = logging.getLogger(__name__)

_CONFIG_CLASSES = {
    "kv_cache_config": ("llmapi", "KvCacheConfig"),
    "cuda_graph_config": ("llmapi", "CudaGraphConfig"),
    "scheduler_config": ("llmapi", "SchedulerConfig"),
    "lora_config": ("lora_helper", "LoraConfig"),
}
"""Keyword of ``LLM`` to the module and the class of its value."""
_MPI_JOB = ("OMPI_COMM_WORLD_", "OMPI_MCA_orte_", "PMIX_", "PMI_")
"""How the variables begin by which ``mpirun`` and ``srun`` tell a process which rank of a job it is."""


def leave_mpi_job() -> None:
    """Forget that this process is a rank of an MPI job, as upstream's own backend does: TensorRT-LLM starts its own.

    To be called before ``tensorrt_llm`` is imported, which starts MPI.
    """
    for name in [name for name in os.environ if name.startswith(_MPI_JOB)]:
        del os.environ[name]


def require_tensorrt_llm() -> Any:
    """Return the package ``tensorrt_llm``.

    Raises:
        DeploymentError: it is not installed, broken, or of another line; says which image has it.
    """
    try:
        package = importlib.import_module("tensorrt_llm")
    except Exception as error:  # its native libraries raise much beside ImportError
        cause = _one_line(error)
        raise DeploymentError(
            f"tensorrt_llm cannot be imported ({cause}); use the image {TENSORRT_LLM_IMAGE}"
        ) from error
    version = str(package.__version__)
    if version.split(".")[:2] != TENSORRT_LLM_LINE.split("."):
        raise DeploymentError(
            f"TensorRT-LLM {version} is installed, {TENSORRT_LLM_LINE}.x is served; use the image {TENSORRT_LLM_IMAGE}"
        )
    return package


def make_llm(deployment: Deployment) -> Any:
    """Return TensorRT-LLM's ``LLM`` for a deployment, its model loaded.

    Raises:
        DeploymentError: in one line, for whatever keeps it from being served.
    """
    arguments = llm_arguments(deployment)
    check_adapters(deployment)
    check_positions(deployment)
    require_tensorrt_llm()
    _require_gpus(deployment)
    log.info("%s", sizes_in_words(deployment))
    if deployment.tensorrt_llm.lora:
        log.info("CUDA graphs are off beside LoRA adapters: decoding is slower")
    try:
        return find("llmapi", "LLM")(**classes(arguments))
    except Exception as error:
        log.exception("TensorRT-LLM could not be started with %s", arguments)
        code = "the checkpoint brings code of its own (auto_map in its config.json), which is not run here: "
        cause = (code if brings_code(deployment) else "") + _one_line(error)
        raise DeploymentError(f"TensorRT-LLM cannot serve this deployment: {cause}") from error


def classes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ``llm_arguments`` with the API's own classes in place of the nested dictionaries."""
    made = dict(arguments)
    for name, (module, class_name) in _CONFIG_CLASSES.items():
        if made.get(name) is not None:
            made[name] = find(module, class_name)(**_with_enums(made[name]))
    if "speculative_config" in made:
        config = dict(made["speculative_config"])
        made["speculative_config"] = find("llmapi", config.pop("class"))(**config)
    return made


def _with_enums(config: dict[str, Any]) -> dict[str, Any]:
    name = "capacity_scheduler_policy"
    return config | ({name: find("llmapi", "CapacitySchedulerPolicy")[config[name]]} if name in config else {})


def _require_gpus(deployment: Deployment) -> None:
    settings = deployment.tensorrt_llm
    needed = settings.tensor_parallel_size * settings.pipeline_parallel_size
    found = find("llmapi.utils", "get_device_count")()
    if found < needed:
        sizes = f"tensor_parallel_size {settings.tensor_parallel_size} x {settings.pipeline_parallel_size} stages"
        raise DeploymentError(f"tensorrt_llm: {sizes} needs {needed} GPUs, here are {found}")


def find(module: str, name: str) -> Any:
    """Return ``name`` of the module ``tensorrt_llm.<module>``."""
    return getattr(importlib.import_module(f"tensorrt_llm.{module}"), name)


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
