"""The commands that compile an engine: first a TensorRT-LLM checkpoint, then ``trtllm-build``.

TensorRT-LLM has two flows. The PyTorch flow serves a Hugging Face checkpoint as it is: the plain one, or one that Model
Optimizer has quantized. The TensorRT flow compiles an engine, from the plain checkpoint always: upstream's own scripts
quantize on the way. Nothing runs here, and nothing of TensorRT-LLM is needed: any machine can print the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inflight.errors import DeploymentError
from inflight.export.compile.run import Command
from inflight.settings.speculation import SpeculationSettings, draft_length, draft_tree
from inflight.text.files import read_json

Flow = Literal["pytorch", "tensorrt"]
EXAMPLES = Path("/app/examples")
"""Where the image has TensorRT-LLM's example scripts."""
_CONVERTERS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
}
"""Architectures with a converter of their own; quantize.py exports the others, unquantized too."""
_SPECULATIVE_MODE = {"eagle": "eagle", "medusa": "medusa", "lookahead": "lookahead_decoding"}
_REDUCE_FUSION = ("LlamaForCausalLM", "Gemma2ForCausalLM", "MedusaForCausalLM")
"""Architectures in which an all-reduce and the norm after it can be one kernel."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass(frozen=True)
class Precision:
    """One precision of the weights, as TensorRT-LLM's tools know it."""

    flows: tuple[Flow, ...]
    """The flows that serve it; the first is the default."""
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """The type of what is not quantized."""
    qformat: str = "full_prec"
    """What quantize.py calls it."""
    gemm_plugin: str = "auto"


LEAST_GROUP = 64
"""The shortest groups of INT4 that TensorRT-LLM has kernels for."""
PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(("pytorch", "tensorrt"), dtype="bfloat16"),
    "fp16": Precision(("pytorch", "tensorrt"), dtype="float16"),
    "fp8": Precision(("pytorch", "tensorrt"), qformat="fp8", gemm_plugin="fp8"),
    "int8": Precision(("tensorrt",), qformat="int8_wo"),
    "int4-awq": Precision(("pytorch", "tensorrt"), qformat="int4_awq"),
    "w4a8-awq": Precision(("pytorch", "tensorrt"), qformat="w4a8_awq"),
    "nvfp4": Precision(("pytorch", "tensorrt"), qformat="nvfp4", gemm_plugin="nvfp4"),
}


def choose_flow(precision: str, wanted: Flow | None = None) -> Flow:
    """Return the flow for a precision of a plan: the wanted one, or the first that serves it.

    Raises:
        DeploymentError: the wanted flow does not serve the precision.
    """
    flows = PRECISIONS[precision].flows
    if wanted is not None and wanted not in flows:
        raise DeploymentError(f"precision {precision} is not served by the {wanted} flow; use the {flows[0]} flow")
    return wanted or flows[0]


@dataclass(frozen=True)
class CompileRequest:
    """One engine to compile."""

    checkpoint: Path
    """The plain Hugging Face checkpoint."""
    model_dir: Path
    """What the tools read in its place, once it is there: the same, perhaps with another ``config.json``."""
    output_dir: Path
    """Where the engine goes."""
    precision: str
    """A key of ``PRECISIONS``."""
    max_batch_size: int
    max_tokens_per_step: int
    max_sequence_length: int
    kv_dtype: Literal["auto", "fp8"]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    speculation: SpeculationSettings
    calibration: Path
    """JSON lines with a ``text`` each, alone in its directory."""
    examples: Path
    python: str
    """TensorRT-LLM's interpreter, which runs the scripts."""
    trtllm_build: str
    group: int
    """Inputs of a row that share a scale in INT4."""

    @property
    def converted_dir(self) -> Path:
        """The directory, beside the engine's, of the TensorRT-LLM checkpoint that lies between the two."""
        return self.output_dir.with_name(f"{self.output_dir.name}.checkpoint")

    @property
    def format(self) -> Precision:
        """What the tools call the precision."""
        return PRECISIONS[self.precision]

    @property
    def ranks(self) -> int:
        """GPUs that the engine is for."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def compile_steps(request: CompileRequest) -> list[Command]:
    """Return the commands that make the engine.

    Raises:
        DeploymentError: the checkpoint cannot be read, or what is asked for cannot be compiled; one line.
    """
    config = read_json(request.checkpoint / "config.json")
    architecture = str((config.get("architectures") or ["unnamed"])[0])
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
    """Return the step to a TensorRT-LLM checkpoint, by one of upstream's scripts."""
    drafts, precision = request.speculation, request.format
    plain = precision.qformat == "full_prec"
    purpose, environment = "convert the checkpoint", {}
    if drafts.method == "eagle":
        tree = draft_tree(drafts)
        script = "eagle/convert_checkpoint.py"
        flags = _script_flags(request) | {
            "workers": request.ranks,
            "eagle_model_dir": drafts.draft_model,
            "max_draft_len": tree.tokens,
            "num_eagle_layers": tree.depth,
            "max_non_leaves_per_layer": tree.most_inner_nodes_of_a_layer,
        }
    elif plain and drafts.method != "medusa" and architecture in _CONVERTERS:
        script = f"models/core/{_CONVERTERS[architecture]}/convert_checkpoint.py"
        flags = _script_flags(request) | {"workers": request.ranks}
        if request.kv_dtype == "fp8":
            if _CONVERTERS[architecture] != "llama":
                raise DeploymentError(f"{architecture} in {request.precision} has no FP8 KV cache; quantize to fp8")
            flags["fp8_kv_cache"] = True
    else:
        if not plain:
            purpose = f"quantize to {request.precision}"
        script, environment, flags = "quantization/quantize.py", _OFFLINE, _quantize_flags(request)
    directory = request.converted_dir
    weights = (directory / f"rank{rank}.safetensors" for rank in range(request.ranks))
    argv = (request.python, str(request.examples / script), *_words(flags))
    return Command(purpose, argv, (directory / "config.json", *weights), environment)


def _script_flags(request: CompileRequest, **own: object) -> dict[str, object]:
    """Return the flags that all of upstream's scripts have, and ``own`` among them."""
    return {
        "model_dir": request.model_dir,
        "output_dir": request.converted_dir,
        "dtype": request.format.dtype,
        **own,
        "tp_size": request.tensor_parallel_size,
        "pp_size": request.pipeline_parallel_size,
    }


def _quantize_flags(request: CompileRequest) -> dict[str, object]:
    flags = _script_flags(request, qformat=request.format.qformat)
    if request.kv_dtype == "fp8":
        if request.format.qformat == "full_prec":
            raise DeploymentError(f"kv_dtype fp8 needs a quantized precision here, not {request.precision}")
        flags["kv_cache_dtype"] = "fp8"
    if "awq" in request.format.qformat:
        flags["awq_block_size"] = request.group
    flags["calib_dataset"] = request.calibration.parent
    if request.speculation.method == "medusa":
        flags |= {
            "medusa_model_dir": request.speculation.draft_model,
            "num_medusa_heads": request.speculation.medusa_heads,
            "max_draft_len": draft_length(request.speculation),
        }
    return flags


def _build(request: CompileRequest, architecture: str) -> Command:
    """Return the step to the engine. Every flag is one of ``trtllm-build`` of TensorRT-LLM 1.2."""
    method = request.speculation.method
    fuses = method is None and request.tensor_parallel_size > 1 and architecture in _REDUCE_FUSION
    flags: dict[str, object] = {
        "checkpoint_dir": request.converted_dir,
        "output_dir": request.output_dir,
        "max_batch_size": request.max_batch_size,
        "max_num_tokens": request.max_tokens_per_step,
        "max_seq_len": request.max_sequence_length,
        "max_beam_width": 1,
        "kv_cache_type": "paged",
        "workers": request.ranks,
    }
    if method is not None:
        flags["speculative_decoding_mode"] = _SPECULATIVE_MODE[method]
        flags["max_draft_len"] = draft_length(request.speculation)
    flags |= {
        "gpt_attention_plugin": "auto",
        "gemm_plugin": request.format.gemm_plugin,
        "remove_input_padding": "enable",
        "use_paged_context_fmha": "enable",
        "use_fp8_context_fmha": "enable" if request.kv_dtype == "fp8" else "disable",
        "multiple_profiles": "enable",
        "reduce_fusion": "enable" if fuses else "disable",
    }
    engines = (request.output_dir / f"rank{rank}.engine" for rank in range(request.ranks))
    produces = (request.output_dir / "config.json", *engines)
    return Command("compile the engine", (request.trtllm_build, *_words(flags)), produces)


def _words(flags: Mapping[str, object]) -> list[str]:
    """Return flags as words of a command line; one that is true has no value."""
    pairs = ([f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in flags.items())
    return [word for pair in pairs for word in pair]
