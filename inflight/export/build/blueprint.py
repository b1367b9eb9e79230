"""Blueprint: what a build will make, decided before anything runs; a dry run shows it, a build carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from inflight.deployment import Deployment, QualitySettings, validate
from inflight.errors import DeploymentError
from inflight.export.build.request import BuildRequest
from inflight.export.build.settings import deployment_settings, own_settings
from inflight.export.checkpoint import Checkpoint
from inflight.export.compile.flows import Flow as TensorRtLlmFlow
from inflight.export.compile.flows import choose_flow
from inflight.export.compile.request import CompileRequest
from inflight.export.interpreters import TensorRtLlm, find_tensorrt_llm
from inflight.export.plan.gpus import Gpu
from inflight.export.plan.plan import Plan, make_plan
from inflight.export.plan.shape import linears
from inflight.export.quantize.config_file import NAME, has_older_rope, with_older_rope
from inflight.export.quantize.modelopt import Recipe, fused_group
from inflight.export.quantize.schemes import SCHEMES
from inflight.manifest import TENSORRT_LLM_IMAGE, Flow
from inflight.text.checkpoint import read_json
from inflight.trtllm.checks import check_positions_of

READABLE = "readable"
"""Directory, beside the engine, of the checkpoint as TensorRT-LLM's tools read it, where they do not as it is."""


@dataclass(frozen=True)
class Blueprint:
    """Everything that follows from a request, its checkpoint and its GPU."""

    request: BuildRequest
    checkpoint: Checkpoint
    gpu: Gpu
    plan: Plan
    recipe: Recipe
    engine: str
    """``engine.kind`` of the deployment."""
    flow: Flow
    settings: Mapping[str, Any]
    """Of the deployment, as they will be written."""
    deployment: Deployment
    """The same, validated; its paths are relative."""
    reasons: tuple[str, ...]
    """Why, where something was chosen."""
    tools: TensorRtLlm | None = None
    """TensorRT-LLM's interpreter; None: a dry run, or the portable engine's build, which needs none."""

    @property
    def quantizes(self) -> bool:
        """Whether weights or the KV cache change their type."""
        return self.recipe.precision in SCHEMES or self.recipe.fp8_kv_cache

    @property
    def companions(self) -> tuple[Path, ...]:
        """Other checkpoints that go into an engine: of drafts, and adapters."""
        draft, adapters = self.deployment.speculation.draft_model, self.deployment.tensorrt_llm.lora.values()
        return (*([draft] if draft else []), *adapters)

    @property
    def quality(self) -> QualitySettings:
        """The thresholds."""
        return self.deployment.quality

    def compile_request(self, checkpoint: Path, output: Path, calibration: Path | None) -> CompileRequest | None:
        """Return what is to be compiled; None: nothing is."""
        if self.flow != "tensorrt":
            return None
        plan, settings = self.plan, self.deployment
        return CompileRequest(
            checkpoint=checkpoint,
            output_dir=output,
            precision=plan.precision,
            compute_capability=self.gpu.capability,
            max_batch_size=settings.batching.max_batch_size,
            max_tokens_per_step=settings.batching.max_tokens_per_step,
            max_sequence_length=settings.limits.max_sequence_length or plan.max_sequence_length,
            kv_dtype="fp8" if plan.kv_cache == "fp8" else "auto",
            tensor_parallel_size=plan.tensor_parallel_size,
            pipeline_parallel_size=plan.pipeline_parallel_size,
            speculation=settings.speculation,
            calibration=calibration,
            flow="tensorrt",
            workers=plan.tensor_parallel_size * plan.pipeline_parallel_size,
            examples=self.request.examples,
            python=self.python,
            trtllm_build=self.tools.program("trtllm-build") if self.tools else "trtllm-build",
            model_dir=checkpoint if self.is_readable else output.with_name(READABLE),
        )

    @property
    def is_readable(self) -> bool:
        """Whether TensorRT-LLM reads the original's ``config.json`` as it is."""
        return has_older_rope(read_json(self.checkpoint.directory / NAME))

    @property
    def python(self) -> str:
        """The interpreter that runs TensorRT-LLM's scripts."""
        return str(self.tools.python if self.tools else self.request.tensorrt_llm_python or "python3")


def draw(request: BuildRequest, checkpoint: Checkpoint, gpu: Gpu, dry_run: bool = False) -> Blueprint:
    """Decide what to build.

    Args:
        request: what is asked for.
        checkpoint: that it is made from.
        gpu: that it is for.
        dry_run: nothing will run here: what is not installed does not matter.

    Raises:
        DeploymentError: it cannot be built, by name.
    """
    keep = _kept(checkpoint, request.keep)
    plan = make_plan(checkpoint.config, gpu, replace(request.plan, precision=request.precision, excluded=keep))
    recipe = Recipe(plan.precision, plan.kv_cache == "fp8", keep)
    none_needed = dry_run or gpu.is_cpu or request.engine == "pytorch"
    tools = None if none_needed else find_tensorrt_llm(request.tensorrt_llm_python)
    engine, reasons = _engine(request, gpu, dry_run or tools is not None)
    flow: Flow = "portable"
    if engine != "pytorch":
        _require_readable(checkpoint)
        flow = choose_flow(plan.precision, gpu.capability, _wanted_flow(request))
        engine = _ENGINE_OF_FLOW[flow]
    elif request.flow is not None:
        why = "the portable engine has none" if gpu.is_cpu or request.engine == "pytorch" else "no Python here has it"
        raise DeploymentError(f"--flow {request.flow} is TensorRT-LLM's; {why}")
    if flow == "tensorrt" and (keep or request.kl_budget is not None):
        raise DeploymentError("--keep and --kl-budget: upstream's quantize.py has neither; use --flow pytorch")
    if request.kl_budget is not None and recipe.precision not in SCHEMES:
        raise DeploymentError(f"--kl-budget: {recipe.precision} quantizes no layer")
    settings = deployment_settings(checkpoint, plan, engine, flow, own_settings(request.settings))
    deployment = validate(settings, "settings")
    if flow == "tensorrt" and deployment.speculation.method == "draft_target":
        raise DeploymentError(
            "speculation.method draft_target: no compiled engine drafts for itself; use --flow pytorch"
        )
    _require_readable_draft(deployment, engine)
    return Blueprint(request, checkpoint, gpu, plan, recipe, engine, flow, settings, deployment, tuple(reasons), tools)


def _require_readable_draft(deployment: Deployment, engine: str) -> None:
    """Refuse now what the compilation or the start would stumble over: a build writes no checkpoint of drafts."""
    draft = deployment.speculation.draft_model
    if engine in _ENGINE_OF_FLOW.values() and draft is not None and (draft / NAME).is_file():
        check_positions_of(draft)


def _require_readable(checkpoint: Checkpoint) -> None:
    if not has_older_rope(with_older_rope(read_json(checkpoint.directory / NAME))):
        raise DeploymentError(
            "config.json: rope_parameters differ between kinds of layers; TensorRT-LLM 1.2 cannot read them"
        )


_ENGINE_OF_FLOW: dict[Flow, str] = {"pytorch": "trtllm", "tensorrt": "tensorrtllm"}


def _wanted_flow(request: BuildRequest) -> TensorRtLlmFlow | None:
    """Return the flow that the options name; each of TensorRT-LLM's engines has one."""
    own: TensorRtLlmFlow | None = {"trtllm": "pytorch", "tensorrtllm": "tensorrt"}.get(request.engine)  # type: ignore
    if own is not None and request.flow not in (None, own):
        raise DeploymentError(f"--engine {request.engine} has no --flow {request.flow}; it serves the {own} flow alone")
    return own or request.flow


def _kept(checkpoint: Checkpoint, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the linears that the patterns name, and those that an engine computes as one with them."""
    names = [linear.name for linear in linears(checkpoint.config)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise DeploymentError(f"--keep {pattern!r} matches no linear layer; they are named like {names[0]}")
    kept = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    groups = {fused_group(name) for name in kept}
    return tuple(name for name in names if fused_group(name) in groups)


def _engine(request: BuildRequest, gpu: Gpu, has_tensorrt_llm: bool) -> tuple[str, list[str]]:
    """Return the deployment's engine, and why where it was chosen here."""
    if request.engine != "auto":
        if gpu.is_cpu and request.engine != "pytorch":
            raise DeploymentError(f"--engine {request.engine} needs a GPU; on cpu the engine is pytorch")
        return request.engine, []
    if gpu.is_cpu:
        return "pytorch", ["engine pytorch: the portable engine, because the deployment is for a CPU"]
    if has_tensorrt_llm:
        return "trtllm", [
            f"engine TensorRT-LLM: {gpu.name} is one of NVIDIA's GPUs; it needs TensorRT-LLM 1.2, which "
            f"{TENSORRT_LLM_IMAGE} has; where it is missing, the same command builds for the portable engine"
        ]
    return "pytorch", ["engine pytorch: the portable engine, because TensorRT-LLM is not installed here"]
