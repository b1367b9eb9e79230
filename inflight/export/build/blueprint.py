"""Blueprint: what a build will make, decided before anything runs; a dry run shows it, a build carries it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.limits import unknown_to_compiler, unknown_to_quantization
from inflight.errors import DeploymentError
from inflight.export.build.request import BuildRequest
from inflight.export.checkpoint import Checkpoint
from inflight.export.compile.run import Command
from inflight.export.compile.steps import LEAST_GROUP, CompileRequest, choose_flow, compile_steps
from inflight.export.compile.steps import Flow as TensorRtLlmFlow
from inflight.export.interpreters import TensorRtLlm, find_tensorrt_llm
from inflight.export.plan.gpus import Gpu
from inflight.export.plan.plan import Plan
from inflight.export.plan.planner import make_plan
from inflight.export.plan.precision import PRECISIONS
from inflight.export.plan.shape import grouped, linears, split_excluded
from inflight.export.quantize.config_file import NAME, has_older_rope, with_older_rope
from inflight.export.quantize.modelopt import SCHEMES, Recipe, fused_group
from inflight.manifest import TENSORRT_LLM_IMAGE, Flow
from inflight.settings.deployment import Deployment, EngineSettings, QualitySettings, read_settings, validate
from inflight.text.files import read_json
from inflight.trtllm.arguments import check_positions
from inflight.trtllm.models import why_unlisted

MODEL, ENGINE = "model", "engine"
"""Directories within a deployment."""
READABLE = "readable"
"""Directory, beside the engine, of the checkpoint as TensorRT-LLM's tools read it, where they do not as it is."""
_DTYPES = {"float32": "float32", "bf16": "bfloat16"}
_DECIDED = {
    ("engine", "kind"): "--engine",
    ("tensorrt_llm", "tensor_parallel_size"): "--tensor-parallel",
    ("tensorrt_llm", "pipeline_parallel_size"): "--gpus",
    ("tensorrt_llm", "engine_dir"): "--flow",
    ("kv_cache", "dtype"): "--kv-cache",
}
"""Settings that the plan and the engine follow from: the option that says them."""


@dataclass(frozen=True)
class Blueprint:
    """Everything that follows from a request and its checkpoint."""

    request: BuildRequest
    checkpoint: Checkpoint
    plan: Plan
    recipe: Recipe
    engine: str
    """``engine.kind`` of the deployment."""
    flow: Flow
    settings: Mapping[str, Any]
    """The settings of the deployment, as they will be written."""
    deployment: Deployment
    """The same, validated; its paths are relative."""
    reasons: tuple[str, ...]
    """Why, where something was chosen."""
    tools: TensorRtLlm | None
    """TensorRT-LLM's interpreter; None: a dry run, or the portable engine's build, which needs none."""

    @property
    def remedy(self) -> str:
        """The advice for a build that lost too much: what loses less, in the flow that it is for."""
        better = self.recipe.better
        if self.flow == "tensorrt":
            return f"better: {better or '`--precision bf16`'}"
        kept = "`--kl-budget` and `--keep` hold the layers that lose most in 16 bits"
        return f"better: {better}; {kept}" if better else f"better: {kept}"

    @property
    def quantizes(self) -> bool:
        """Whether weights or the KV cache change their type."""
        return self.recipe.precision in SCHEMES or self.recipe.fp8_kv_cache

    @property
    def calibrates(self) -> bool:
        """Whether what is made goes by the data that the model is shown."""
        return self.quantizes and self.recipe.calibrates

    @property
    def is_readable(self) -> bool:
        """Whether TensorRT-LLM reads the original's ``config.json`` as it is."""
        return has_older_rope(read_json(self.checkpoint.directory / NAME))

    @property
    def python(self) -> str:
        """The interpreter that runs TensorRT-LLM's scripts."""
        return str(self.tools.python if self.tools else self.request.tensorrt_llm_python or "python3")

    def commands(self, out: Path) -> list[Command]:
        """Return the commands that compile the engine into ``out``; none where the checkpoint itself is served."""
        if self.flow != "tensorrt":
            return []
        plan, settings, checkpoint = self.plan, self.deployment, self.checkpoint.directory
        request = CompileRequest(
            checkpoint=checkpoint,
            model_dir=checkpoint if self.is_readable else out / READABLE,
            output_dir=out / ENGINE,
            precision=plan.precision,
            group=self.recipe.group,
            max_batch_size=settings.batching.max_batch_size,
            max_tokens_per_step=settings.batching.max_tokens_per_step,
            max_sequence_length=settings.limits.max_sequence_length or plan.max_sequence_length,
            kv_dtype="fp8" if plan.kv_cache == "fp8" else "auto",
            tensor_parallel_size=plan.tensor_parallel_size,
            pipeline_parallel_size=plan.pipeline_parallel_size,
            speculation=settings.speculation,
            calibration=out / "calibration" / "calibration.jsonl",
            examples=self.request.examples,
            python=self.python,
            trtllm_build=self.tools.program("trtllm-build") if self.tools else "trtllm-build",
        )
        return compile_steps(request)


def make_blueprint(request: BuildRequest, checkpoint: Checkpoint, gpu: Gpu, dry_run: bool = False) -> Blueprint:
    """Decide what to build; in a dry run, what is not installed here does not matter.

    Raises:
        DeploymentError: it cannot be built, by name.
    """
    keep = _kept(checkpoint, request.keep)
    config = checkpoint.config
    if gpu.is_cpu and (dtype := own_engine(request).dtype) != "auto":  # of what is not quantized
        config = replace(config, dtype=dtype)
    plan = make_plan(config, gpu, replace(request.plan, precision=request.precision, excluded=keep))
    if plan.precision in SCHEMES:
        _require_quantizable(checkpoint.config, plan.precision)
    none_needed = dry_run or gpu.is_cpu or request.engine == "pytorch"
    tools = None if none_needed else find_tensorrt_llm(request.tensorrt_llm_python)
    engine, reasons = _engine(request, gpu, checkpoint.config, dry_run or tools is not None)
    flow: Flow = "portable"
    if engine != "pytorch":
        flow = choose_flow(plan.precision, _wanted_flow(request))
        engine = "trtllm" if flow == "pytorch" else "tensorrtllm"
    elif request.flow is not None:
        portable = "the portable engine has none" if gpu.is_cpu or request.engine == "pytorch" else None
        why = portable or why_unlisted(checkpoint.config) or "no Python here has it"
        raise DeploymentError(f"--flow {request.flow} is TensorRT-LLM's; {why}")
    if flow == "tensorrt" and (unknown := unknown_to_compiler(checkpoint.config)):
        raise DeploymentError(
            f"--flow tensorrt: no engine is compiled of models with {', '.join(unknown)}; --flow pytorch serves the "
            "checkpoint as it is"
        )
    if flow == "tensorrt" and (keep or request.kl_budget is not None):
        raise DeploymentError("--keep and --kl-budget: upstream's quantize.py has neither; use --flow pytorch")
    if request.kl_budget is not None and plan.precision not in SCHEMES:
        raise DeploymentError(f"--kl-budget: {plan.precision} quantizes no layer")
    recipe = _recipe(plan, checkpoint.config, keep, flow)
    settings = _deployment_settings(checkpoint, plan, recipe, engine, flow, _own_settings(request.settings))
    deployment = validate(settings, "settings")
    if flow == "tensorrt" and deployment.speculation.method == "draft_target":
        raise DeploymentError(
            "speculation.method draft_target: no compiled engine drafts for itself; use --flow pytorch"
        )
    if flow != "portable":
        _require_readable(checkpoint, deployment.speculation.draft_model)
    return Blueprint(request, checkpoint, plan, recipe, engine, flow, settings, deployment, reasons, tools)


def _recipe(plan: Plan, config: ModelConfig, keep: tuple[str, ...], flow: Flow) -> Recipe:
    """Return what the checkpoint becomes. Raises DeploymentError: its engine does not compute that."""
    precision, fp8_kv_cache = grouped(PRECISIONS[plan.precision], config, keep), plan.kv_cache == "fp8"
    if precision.name == "int8":
        if flow == "tensorrt":
            return Recipe("int8", fp8_kv_cache, keep)
        if fp8_kv_cache:
            raise DeploymentError(
                "--kv-cache fp8: int8 is not calibrated, and an FP8 cache wants scales; use --kv-cache bf16"
            )
    if flow != "portable" and precision.group < LEAST_GROUP < PRECISIONS[plan.precision].group:
        raise DeploymentError(
            f"precision {precision.name}: the model's linears need groups of {precision.group} inputs, and "
            f"TensorRT-LLM has {LEAST_GROUP} and more; use --engine pytorch or another precision"
        )
    return Recipe(precision.name, fp8_kv_cache, keep, precision.group)


def _require_quantizable(config: ModelConfig, precision: str) -> None:
    """Refuse what quantization has not been shown to be right for."""
    if found := unknown_to_quantization(config):
        raise DeploymentError(
            f"precision {precision}: `inflight build` does not quantize models with {', '.join(found)}; bf16 builds it "
            "as it is, and a checkpoint that is quantized already can be served as it is"
        )


def _require_readable(checkpoint: Checkpoint, draft: Path | None) -> None:
    """Refuse now what the compilation or the start would stumble over."""
    if not has_older_rope(with_older_rope(read_json(checkpoint.directory / NAME))):
        raise DeploymentError(
            "config.json: rope_parameters differ between kinds of layers; TensorRT-LLM 1.2 cannot read them"
        )
    if draft is not None and (draft / NAME).is_file():  # a build writes no checkpoint of drafts
        check_positions(draft)


def _wanted_flow(request: BuildRequest) -> TensorRtLlmFlow | None:
    """Return the flow that the options name; each of TensorRT-LLM's engines has one."""
    own: TensorRtLlmFlow | None = {"trtllm": "pytorch", "tensorrtllm": "tensorrt"}.get(request.engine)  # type: ignore
    if own is not None and request.flow not in (None, own):
        raise DeploymentError(f"--engine {request.engine} has no --flow {request.flow}; it serves the {own} flow alone")
    return own or request.flow


def _kept(checkpoint: Checkpoint, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the linears that the patterns name, and those that an engine computes as one with them."""
    _, named = split_excluded(checkpoint.config, patterns, "--keep")
    groups = {fused_group(linear.name) for linear in named}
    return tuple(linear.name for linear in linears(checkpoint.config) if fused_group(linear.name) in groups)


def _engine(
    request: BuildRequest, gpu: Gpu, config: ModelConfig, has_tensorrt_llm: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the deployment's engine, and why where it was chosen here."""
    unlisted = why_unlisted(config)
    if request.engine != "auto":
        if gpu.is_cpu and request.engine != "pytorch":
            raise DeploymentError(f"--engine {request.engine} needs a GPU; on cpu the engine is pytorch")
        if unlisted is not None and request.engine != "pytorch":
            raise DeploymentError(f"--engine {request.engine}: {unlisted}; --engine pytorch is the portable engine")
        return request.engine, ()
    if unlisted is not None and not gpu.is_cpu:
        return "pytorch", (f"engine pytorch: the portable engine, because {unlisted}",)
    if gpu.is_cpu:
        return "pytorch", ("engine pytorch: the portable engine, because the deployment is for a CPU",)
    if has_tensorrt_llm:
        return "trtllm", (
            f"engine TensorRT-LLM: {gpu.name} is one of NVIDIA's GPUs; it needs TensorRT-LLM 1.2, which "
            f"{TENSORRT_LLM_IMAGE} has; where it is missing, the same command builds for the portable engine",
        )
    return "pytorch", ("engine pytorch: the portable engine, because TensorRT-LLM is not installed here",)


def _own_settings(path: Path | None) -> dict[str, Any]:
    """Read the user's settings; their paths become absolute, because they go into another directory.

    Raises:
        DeploymentError: the file cannot be read, or what it names is not there.
    """
    if path is None:
        return {}

    def absolute(place: str) -> str:
        found = (path.parent / place).resolve()
        if not found.is_dir():
            raise DeploymentError(f"{path}: {place} is not a directory beside it")
        return str(found)

    data = read_settings(path)
    data.pop("model", None)  # a whole deployment.yaml may serve as the settings of another build
    if isinstance(draft := _section(data, "speculation").get("draft_model"), str):
        data["speculation"]["draft_model"] = absolute(draft)
    if isinstance(adapters := _section(data, "tensorrt_llm").get("lora"), dict):
        data["tensorrt_llm"]["lora"] = {name: absolute(str(place)) for name, place in adapters.items()}
    return data


def own_engine(request: BuildRequest) -> EngineSettings:
    """Return what the user's settings say of the engine; what they do not say has its default.

    Raises:
        DeploymentError: they say something wrong.
    """
    engine = _section(_own_settings(request.settings), "engine")
    return validate({"model": MODEL, "engine": engine}, "settings").engine


def _deployment_settings(
    checkpoint: Checkpoint, plan: Plan, recipe: Recipe, engine: str, flow: Flow, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what deployment.yaml will say: the plan's, and over it the user's own.

    Raises:
        DeploymentError: a setting of the user's contradicts what is built.
    """
    settings: dict[str, Any] = {
        "model": MODEL,
        "engine": {"kind": engine},
        "batching": {"max_batch_size": plan.max_batch_size, "max_tokens_per_step": plan.max_tokens_per_step},
        "limits": {"max_sequence_length": plan.max_sequence_length},
        "quality": QualitySettings.model_validate(recipe.limits).model_dump(),
    }
    if flow != "tensorrt":  # whose converter has an option of its own for the type
        dtype = checkpoint.config.dtype
        if plan.precision == "fp16" and (engine == "pytorch" or dtype != "float16"):
            raise DeploymentError(
                f"precision fp16: the checkpoint is {dtype}, and {engine} does not convert it; use bf16"
            )
        if plan.precision in _DTYPES:  # quantized, it is the checkpoint's own
            settings["engine"]["dtype"] = _DTYPES[plan.precision]
    if engine == "pytorch":
        most = _section(own, "batching").get("max_tokens_per_step", plan.max_tokens_per_step)
        if plan.predicted and plan.prefill_chunk_tokens is not None and isinstance(most, int):
            settings["batching"]["prefill_chunk_tokens"] = min(most, plan.prefill_chunk_tokens)
        settings["kv_cache"] = {"tokens": plan.kv_cache_tokens}
        if plan.kv_cache == "bf16" and plan.precision == "float32":
            settings["kv_cache"]["dtype"] = "bfloat16"
    else:
        settings["tensorrt_llm"] = {
            "tensor_parallel_size": plan.tensor_parallel_size,
            "pipeline_parallel_size": plan.pipeline_parallel_size,
            "free_gpu_memory_fraction": plan.free_gpu_memory_fraction,
        }
        if flow == "tensorrt":
            settings["tensorrt_llm"]["engine_dir"] = ENGINE
        elif not _section(own, "tensorrt_llm").get("lora"):  # beside adapters there are no CUDA graphs
            settings["tensorrt_llm"]["cuda_graph_batch_sizes"] = _graph_sizes(plan.max_batch_size)
    _refuse_contradictions(plan, settings, own)
    length, limit = _section(own, "limits").get("max_sequence_length"), checkpoint.config.max_position_embeddings
    if isinstance(length, int) and length > limit:
        raise DeploymentError(f"settings: limits.max_sequence_length is {length}; the model's own limit is {limit}")
    return settings | {
        key: {**settings.get(key, {}), **value} if isinstance(value, Mapping) else value for key, value in own.items()
    }


def _refuse_contradictions(plan: Plan, settings: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse settings of the user's that say otherwise than what the rest of the build is made for."""
    for (section, key), option in _DECIDED.items():
        if key not in _section(own, section):
            continue
        value, decided = own[section][key], _section(settings, section).get(key)
        if key == "dtype":
            decided = "fp8" if plan.kv_cache == "fp8" else decided or "auto"
        if value not in (decided, "auto"):
            raise DeploymentError(
                f"settings: {section}.{key} is {value!r}; the build is for {decided!r}: say it with {option}"
            )


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section; nothing where it is none, which the validation will tell."""
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


def _graph_sizes(largest: int) -> list[int]:
    """Return the decode batches that get a CUDA graph: close together where they are small, up to the largest.

    As TensorRT-LLM chooses them when it pads batches; but its own choice ends at 128.
    """
    sizes = {1, 2, 4, *range(8, 129, 8), *(2**power for power in range(8, 13)), largest}
    return sorted(size for size in sizes if size <= largest)
