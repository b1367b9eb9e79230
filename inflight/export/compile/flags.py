"""The flags of ``trtllm-build`` (TensorRT-LLM 1.2.x), each a typed field, and the rules between them.

A flag that is None is left out, so that the tool's own default holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inflight.errors import DeploymentError, nearest
from inflight.machine import ComputeCapability

Switch = Literal["enable", "disable"] | None
Plugin = Literal["auto", "float16", "float32", "bfloat16", "int32", "disable"] | None
Fp8Plugin = Literal["fp8", "disable"] | None
Count = int | None

_NOT_ON_SM100 = (
    "gemm_swiglu_plugin",
    "fp8_rowwise_gemm_plugin",
    "low_latency_gemm_plugin",
    "low_latency_gemm_swiglu_plugin",
    "bert_context_fmha_fp32_acc",
)
_REDUCE_FUSION = ("LlamaForCausalLM", "Gemma2ForCausalLM", "MedusaForCausalLM")


class BuildFlags(BaseModel):
    """The command line of one ``trtllm-build``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint_dir: Path
    output_dir: Path
    max_batch_size: int = Field(ge=1)
    max_num_tokens: int = Field(ge=1)
    max_seq_len: int = Field(ge=2)
    max_beam_width: int = Field(1, ge=1)
    opt_num_tokens: Count = Field(None, ge=1)
    max_prompt_embedding_table_size: Count = Field(None, ge=0)
    kv_cache_type: Literal["continuous", "paged", "disabled"] = "paged"
    input_timing_cache: Path | None = None
    output_timing_cache: Path | None = None
    profiling_verbosity: Literal["layer_names_only", "detailed", "none"] | None = None
    strip_plan: bool = False
    weight_sparsity: bool = False
    weight_streaming: bool = False
    fast_build: bool = False
    workers: int = Field(1, ge=1)
    log_level: Literal["internal_error", "error", "warning", "info", "verbose", "debug", "trace"] | None = None
    enable_debug_output: bool = False
    monitor_memory: bool = False
    logits_dtype: Literal["float16", "float32"] | None = None
    gather_context_logits: bool = False
    lora_dir: tuple[Path, ...] = ()
    lora_ckpt_source: Literal["hf", "nemo"] | None = None
    lora_target_modules: tuple[str, ...] = ()
    max_lora_rank: Count = Field(None, ge=1)
    speculative_decoding_mode: (
        Literal["draft_tokens_external", "lookahead_decoding", "medusa", "explicit_draft_tokens", "eagle"] | None
    ) = None
    max_draft_len: Count = Field(None, ge=0)

    bert_attention_plugin: Plugin = None
    gpt_attention_plugin: Plugin = "auto"
    gemm_plugin: Literal["auto", "float16", "float32", "bfloat16", "int32", "fp8", "nvfp4", "disable"] | None = None
    gemm_swiglu_plugin: Fp8Plugin = None
    fp8_rowwise_gemm_plugin: Plugin = None
    lora_plugin: Plugin = None
    dora_plugin: Switch = None
    moe_plugin: Plugin = None
    mamba_conv1d_plugin: Plugin = None
    nccl_plugin: Plugin = None
    low_latency_gemm_plugin: Fp8Plugin = None
    low_latency_gemm_swiglu_plugin: Fp8Plugin = None
    gemm_allreduce_plugin: Literal["float16", "bfloat16", "disable"] | None = None
    context_fmha: Switch = None
    bert_context_fmha_fp32_acc: Switch = None
    remove_input_padding: Switch = "enable"
    tokens_per_block: Count = Field(None, ge=1)
    use_paged_context_fmha: Switch = "enable"
    use_fp8_context_fmha: Switch = "disable"
    fuse_fp4_quant: Switch = None
    multiple_profiles: Switch = "enable"
    paged_state: Switch = None
    norm_quant_fusion: Switch = None
    reduce_fusion: Switch = "disable"
    user_buffer: Switch = None
    use_fused_mlp: Switch = None
    pp_reduce_scatter: Switch = None

    @model_validator(mode="after")
    def _rules(self) -> BuildFlags:
        if self.multiple_profiles == "enable" and self.opt_num_tokens is not None:
            raise ValueError("opt_num_tokens needs multiple_profiles disable: they exclude each other")
        if self.gather_context_logits and self.max_draft_len:
            raise ValueError("gather_context_logits excludes max_draft_len above 0")
        if self.user_buffer == "enable" and self.reduce_fusion != "enable":
            raise ValueError("user_buffer needs reduce_fusion enable")
        if self.lora_dir and self.lora_plugin in (None, "disable"):
            raise ValueError("lora_dir needs lora_plugin")
        return self

    def check(
        self, architecture: str, precision: str, tensor_parallel_size: int, compute_capability: ComputeCapability
    ) -> None:
        """Check the rules that depend on what is built, and for which chip.

        Raises:
            DeploymentError: names the flag and what it needs.
        """
        if compute_capability[0] == 10:  # the SM100 family: B200, GB200
            for name in _NOT_ON_SM100:
                if getattr(self, name) not in (None, "disable"):
                    raise DeploymentError(f"trtllm-build: {name} does not exist on SM100 (B200, GB200)")
        if self.reduce_fusion == "enable" and not allows_reduce_fusion(architecture, tensor_parallel_size):
            raise DeploymentError("trtllm-build: reduce_fusion needs tensor parallelism and Llama, Gemma 2 or Medusa")
        if self.norm_quant_fusion == "enable" and (architecture, precision) != ("LlamaForCausalLM", "nvfp4"):
            raise DeploymentError("trtllm-build: norm_quant_fusion needs Llama in nvfp4")
        if self.pp_reduce_scatter == "enable" and architecture != "MixtralForCausalLM":
            raise DeploymentError("trtllm-build: pp_reduce_scatter is for Mixtral only")

    def arguments(self) -> list[str]:
        """Return the command line, without the program."""
        words: list[str] = []
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value is None or value is False or value == ():
                continue
            words.append(f"--{name}")
            if value is not True:
                words += map(str, value if isinstance(value, tuple) else (value,))
        return words


def allows_reduce_fusion(architecture: str, tensor_parallel_size: int) -> bool:
    """Return whether all-reduce and the norm after it can be one kernel."""
    return tensor_parallel_size > 1 and architecture in _REDUCE_FUSION


def make_flags(values: dict[str, Any]) -> BuildFlags:
    """Return the flags with these values; text is read as the flag's own type.

    Raises:
        DeploymentError: a flag is unknown, or has a value that it does not take; one line.
    """
    try:
        return BuildFlags.model_validate(values)
    except ValidationError as error:
        detail = error.errors()[0]
        name = str(detail["loc"][0]) if detail["loc"] else ""
        if detail["type"] == "extra_forbidden":
            close = nearest(name, BuildFlags.model_fields)
            raise DeploymentError(f"trtllm-build of TensorRT-LLM 1.2 has no flag --{name}{close}") from None
        message = detail["msg"].removeprefix("Value error, ")
        said = f"--{name} is {detail['input']!r}: " if name else ""
        raise DeploymentError(f"trtllm-build: {said}{message[:1].lower()}{message[1:]}") from None
