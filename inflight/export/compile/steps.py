"""The commands that compile an engine: first a TensorRT-LLM checkpoint, then ``trtllm-build``.

Pure: nothing runs here, and nothing of TensorRT-LLM is needed, so that any machine can print them.
"""

from __future__ import annotations

from typing import Any

from inflight.errors import DeploymentError
from inflight.export.compile.flags import allows_reduce_fusion, make_flags
from inflight.export.compile.request import CompileRequest
from inflight.export.compile.run import Command
from inflight.speculation import draft_length, draft_tree
from inflight.text.checkpoint import read_json

_CONVERTERS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
}
"""Architectures with a converter of their own; quantize.py exports the others, unquantized too."""
_SPECULATIVE_MODE = {
    "draft_target": "draft_tokens_external",
    "eagle": "eagle",
    "medusa": "medusa",
    "lookahead": "lookahead_decoding",
}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def compile_steps(request: CompileRequest) -> list[Command]:
    """Return the commands that make the engine; none for the PyTorch flow, which serves the checkpoint as it is.

    Raises:
        DeploymentError: the checkpoint cannot be read, or what is asked for cannot be compiled; one line.
    """
    if request.flow == "pytorch":
        return []
    config = read_json(request.checkpoint / "config.json")
    architecture = str((config.get("architectures") or ["unnamed"])[0])
    if "quantization_config" in config or (request.checkpoint / "hf_quant_config.json").is_file():
        raise DeploymentError(
            f"{request.checkpoint} is quantized; an engine is compiled from the plain checkpoint, "
            "or serve this one with the PyTorch flow"
        )
    _require_draftable(request, architecture)
    return [_convert(request, architecture), _build(request, architecture)]


def _require_draftable(request: CompileRequest, architecture: str) -> None:
    settings = request.speculation
    if settings.method is None:
        return
    if settings.method not in _SPECULATIVE_MODE:
        raise DeploymentError(f"speculation.method {settings.method} needs the PyTorch flow; an engine has none for it")
    if settings.method in ("eagle", "medusa"):
        if architecture != "LlamaForCausalLM":
            raise DeploymentError(f"speculation.method {settings.method} is for Llama, not {architecture}")
        draft_tree(settings)
    if settings.method == "eagle":
        if request.pipeline_parallel_size > 1:
            raise DeploymentError("speculation.method eagle excludes pipeline parallelism")
        if request.format.qformat != "full_prec" or request.kv_dtype == "fp8":
            raise DeploymentError("speculation.method eagle: its engine is bf16 or fp16 throughout, not quantized")


def _convert(request: CompileRequest, architecture: str) -> Command:
    """Return the step to a TensorRT-LLM checkpoint."""
    plain = request.format.qformat == "full_prec"
    if request.speculation.method == "eagle":
        script, flags = "eagle", _converter_flags(request) | _eagle_flags(request)
    elif plain and request.speculation.method != "medusa" and architecture in _CONVERTERS:
        script, flags = f"models/core/{_CONVERTERS[architecture]}", _converter_flags(request)
        if request.kv_dtype == "fp8":
            if script != "models/core/llama":
                raise DeploymentError(f"{architecture} in {request.precision} has no FP8 KV cache; quantize to fp8")
            flags["fp8_kv_cache"] = True
    else:
        return _quantize(request)
    path = request.examples / script / "convert_checkpoint.py"
    return _script(request, "convert the checkpoint", str(path), flags)


def _converter_flags(request: CompileRequest) -> dict[str, Any]:
    return {
        "model_dir": request.model_dir,
        "output_dir": request.converted_dir,
        "dtype": request.format.dtype,
        "tp_size": request.tensor_parallel_size,
        "pp_size": request.pipeline_parallel_size,
        "workers": request.workers,
    }


def _eagle_flags(request: CompileRequest) -> dict[str, Any]:
    tree = draft_tree(request.speculation)
    return {
        "eagle_model_dir": request.speculation.draft_model,
        "max_draft_len": tree.tokens,
        "num_eagle_layers": tree.depth,
        "max_non_leaves_per_layer": tree.most_inner_nodes_of_a_layer,
    }


def _quantize(request: CompileRequest) -> Command:
    if request.format.qformat == "full_prec" and request.kv_dtype == "fp8":
        raise DeploymentError(f"kv_dtype fp8 needs a quantized precision here, not {request.precision}")
    flags: dict[str, Any] = {
        "model_dir": request.model_dir,
        "output_dir": request.converted_dir,
        "dtype": request.format.dtype,
        "qformat": request.format.qformat,
        "tp_size": request.tensor_parallel_size,
        "pp_size": request.pipeline_parallel_size,
    }
    if request.kv_dtype == "fp8":
        flags["kv_cache_dtype"] = "fp8"
    if request.calibration is not None:
        flags["calib_dataset"] = request.calibration.parent
    if request.speculation.method == "medusa":
        flags |= {
            "medusa_model_dir": request.speculation.draft_model,
            "num_medusa_heads": request.speculation.medusa_heads,
            "max_draft_len": draft_length(request.speculation),
        }
    script = str(request.examples / "quantization/quantize.py")
    purpose = "convert the checkpoint" if request.format.qformat == "full_prec" else f"quantize to {request.precision}"
    return _script(request, purpose, script, flags, {} if request.calibration is None else _OFFLINE)


def _script(
    request: CompileRequest, purpose: str, script: str, flags: dict[str, Any], environment: dict[str, str] | None = None
) -> Command:
    words = [word for name, value in flags.items() for word in _words(name, value)]
    directory = request.converted_dir
    ranks = (directory / f"rank{rank}.safetensors" for rank in range(request.ranks))
    return Command(
        purpose, (request.python, script, *words), (directory / "config.json", *ranks), environment=environment or {}
    )


def _words(name: str, value: Any) -> tuple[str, ...]:
    return (f"--{name}",) if value is True else (f"--{name}", str(value))


def _build(request: CompileRequest, architecture: str) -> Command:
    method = request.speculation.method
    values: dict[str, Any] = {
        "checkpoint_dir": request.converted_dir,
        "output_dir": request.output_dir,
        "max_batch_size": request.max_batch_size,
        "max_num_tokens": request.max_tokens_per_step,
        "max_seq_len": request.max_sequence_length,
        "max_beam_width": request.max_beam_width,
        "workers": request.workers,
        "gemm_plugin": request.format.gemm_plugin,
        "use_fp8_context_fmha": "enable" if request.kv_dtype == "fp8" else "disable",
    }
    if method is None and allows_reduce_fusion(architecture, request.tensor_parallel_size):
        values["reduce_fusion"] = "enable"
    if method is not None:
        values |= {
            "speculative_decoding_mode": _SPECULATIVE_MODE[method],
            "max_draft_len": draft_length(request.speculation),
        }
    flags = make_flags(values | request.build_flags)
    flags.check(architecture, request.precision, request.tensor_parallel_size, request.compute_capability)
    engines = (request.output_dir / f"rank{rank}.engine" for rank in range(request.ranks))
    produces = (request.output_dir / "config.json", *engines)
    return Command("compile the engine", (request.trtllm_build, *flags.arguments()), produces)
