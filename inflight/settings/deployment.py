"""A deployment: one directory with one configuration file, ``deployment.yaml``, validated and frozen.

Every key has a type, a default and a one-line description; docs/deployment.md is written from them. An unknown or wrong
key stops the start with its name, what is allowed, and the nearest known key.
This module knows the names and limits of settings, not what they do. The marks on the keys (``ReadBy``) say which kinds
of engine read a key; every kind reads a key without a mark.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from inflight.errors import DeploymentError, readable
from inflight.gguf.files import is_gguf, locate_model, title_of, whole_path
from inflight.settings.batching import BatchingSettings
from inflight.settings.door import DoorSettings
from inflight.settings.gateway import GatewaySettings
from inflight.settings.guided import MOST_GUIDE_BYTES, GuidedDecodingSettings
from inflight.settings.kv_cache import KvCacheSettings
from inflight.settings.observability import ObservabilitySettings
from inflight.settings.section import (
    COMPILED,
    PORTABLE_ONLY,
    WITH_A_MODEL,
    EngineKind,
    ReadBy,
    Section,
    explain,
    unread_keys,
)
from inflight.settings.server import ServerSettings
from inflight.settings.speculation import SpeculationSettings

FILE_NAME = "deployment.yaml"
ENVIRONMENT_VARIABLE = "INFLIGHT_DEPLOYMENT"
"""Names the deployment's directory to the stages; set by ``inflight serve``."""
DOOR_VARIABLE = "INFLIGHT_DOOR"
"""Tells the stages whether there is a door, "on" or "off"; set by ``inflight serve``, whose options may decide it."""
Milliseconds = Annotated[float, Field(ge=0, le=3_600_000, allow_inf_nan=False)]
"""A time of at most an hour: a longer one is taken for a mistaken unit."""
_SAYS_NOTHING = re.compile(r"model|[0-9a-f]{40}(-.*)?")
"""Matches names of checkpoint directories that do not tell one model from another."""

_CHOSEN_TYPE = ReadBy(("pytorch", "trtllm"), "`{key}` needs the PyTorch flow; a compiled engine has its own")
_REPLAY_ONLY = ReadBy(
    ("replay",), "`{key}` is {value:g}: it needs `kind: replay`; no other engine has a set pace", off_too=False
)
_TRTLLM_ONLY = ReadBy(("trtllm",))
_TENSORRTLLM_ONLY = ReadBy(("tensorrtllm",))
_COMPILED_ENGINE = ReadBy(("tensorrtllm",), f"`{{key}}` needs another kind than trtllm: {COMPILED}", off_too=False)


def check_device(name: str) -> None:
    """Check a value of ``engine.device``. Raises ValueError: it names no device; the message says what it may be."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError("it must be cpu, cuda, cuda:N or auto")


class EngineSettings(Section):
    """Which engine, and the portable one's device."""

    kind: EngineKind = Field(
        "pytorch",
        description="pytorch: the portable engine; trtllm: TensorRT-LLM's PyTorch flow on the checkpoint, by its LLM "
        "API; tensorrtllm: a compiled engine, by upstream's C++ backend; replay: answer with the prompt's own tokens, "
        "without a model, to measure the stages",
    )
    replay_queue_ms: Annotated[Milliseconds, _REPLAY_ONLY] = Field(
        0, description="how long a request waits in the replay engine, at least"
    )
    replay_prefill_ms: Annotated[Milliseconds, _REPLAY_ONLY] = Field(
        0, description="its time from being scheduled to the first token"
    )
    replay_step_ms: Annotated[Milliseconds, _REPLAY_ONLY] = Field(
        0, description="its time from each token to the next; alone, the step of one clock for all requests"
    )
    device: Annotated[str, PORTABLE_ONLY] = Field(
        "auto", description="cpu, cuda, cuda:N, or auto: a GPU if there is one"
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], WITH_A_MODEL, _CHOSEN_TYPE] = Field(
        "auto",
        description="of the computation, and of weights that are not quantized; auto: the checkpoint's own type, "
        "float16 as bfloat16 on a GPU, as float32 on a CPU",
    )
    threads: Annotated[int | None, PORTABLE_ONLY] = Field(
        None,
        ge=1,
        description="CPU threads of the engine; null: all cores but one; all, where there are fewer than eight and "
        "Inflight's own kernels compute (`cpu_step`)",
    )
    cpu_step: Annotated[
        Literal["auto", "pytorch", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"], PORTABLE_ONLY
    ] = Field(
        "auto",
        description="what computes on a CPU: kernels of Inflight's own for an instruction set, or PyTorch; auto: the "
        "kernels of the best set that the processor has, or PyTorch where there are none for the checkpoint. "
        "avx512_bf16 is not the best where its products run at less than three quarters of the speed of float32's, "
        "which is measured at the start; amx is chosen by name only, since its tiles have not run on a real processor "
        "yet",
    )
    weights: Annotated[Literal["checkpoint", "int8"], PORTABLE_ONLY] = Field(
        "checkpoint",
        description="types of the weights. checkpoint: as it has them; int8: those that the checkpoint has not "
        "quantized are rounded to INT8 as they are loaded, by groups of inputs, and Inflight's own kernels multiply "
        "them with inputs that are rounded to integers too (`cpu_step`; PyTorch and GPUs refuse it). A draft model "
        "keeps its own",
    )
    modeling: Annotated[Literal["auto", "native", "transformers"], PORTABLE_ONLY] = Field(
        "auto",
        description="whose code computes the model. native: Inflight's own; transformers: that of the package of this "
        "name, beside Inflight's attention and KV cache, in PyTorch; auto: Inflight's own where it knows the "
        "architecture (docs/adapter.md)",
    )
    batch_invariant: Annotated[bool, WITH_A_MODEL, PORTABLE_ONLY] = Field(
        False,
        description="tokens do not depend, even by rounding, on what else is computed with them. On a CPU it changes "
        "nothing, as float32 has that there anyway; on a GPU of compute capability 9.0 (other GPUs refuse it) "
        "decoding and prompts take longer, most of all with more than 64 sequences, and FP8 weights are decoded",
    )

    @field_validator("device")
    @classmethod
    def _a_device_that_is_known(cls, value: str) -> str:
        check_device(value)
        return value


class TensorRtLlmSettings(Section):
    """TensorRT-LLM, for the engine kinds `trtllm` and `tensorrtllm`."""

    read_by = (ReadBy(("trtllm", "tensorrtllm")),)

    engine_dir: Annotated[Path | None, _COMPILED_ENGINE] = Field(
        None, description="compiled TensorRT engine, relative to the deployment; `tensorrtllm` needs one"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share each layer")
    pipeline_parallel_size: int = Field(1, ge=1, description="groups of GPUs that share the layers")
    free_gpu_memory_fraction: float = Field(
        0.9, gt=0, le=1, description="of the memory that weights leave, for the KV cache; kv_cache.tokens limits it too"
    )
    host_cache_bytes: int = Field(0, ge=0, description="host memory for KV blocks that leave the GPU; 0: none")
    cuda_graph_batch_sizes: Annotated[list[int] | None, _TRTLLM_ONLY] = Field(
        None,
        description="decode batch sizes that get a CUDA graph; null: TensorRT-LLM's own choice; none beside `lora`",
    )
    sampler: Annotated[Literal["trtllm", "torch"], _TRTLLM_ONLY] = Field(
        "trtllm",
        description="trtllm: serves penalties, min_p, bad words and seeds; torch: serves "
        "num_top_log_probs, and is the only one beside speculation. What a sampler does not serve is refused",
    )
    guided_decoding: Annotated[Literal["xgrammar", "llguidance"] | None, _TRTLLM_ONLY] = Field(
        None, description="what enforces JSON schemas, regular expressions and grammars; null: refused"
    )
    lora: Annotated[dict[str, Path], _TRTLLM_ONLY] = Field(
        {}, description="LoRA adapters by name, relative to the deployment"
    )
    max_lora_rank: Annotated[int, _TRTLLM_ONLY] = Field(64, ge=1, description="largest rank among them")
    watchdog_s: Annotated[float, _TRTLLM_ONLY] = Field(
        60, gt=0, description="without progress for so long while requests run, they fail and the server is not ready"
    )
    parameters: Annotated[dict[str, str], _TENSORRTLLM_ONLY] = Field(
        {}, description="parameters of upstream's C++ backend that take the place of what the deployment implies"
    )

    @property
    def ranks(self) -> int:
        """GPUs that one engine runs on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class QualitySettings(Section):
    """What a quantized checkpoint may lose against the original; `inflight build` fails where it loses more."""

    max_perplexity_increase: float = Field(
        0.005, ge=0, description="of the held-out text, as a fraction; a build to 4 bits writes more"
    )
    max_kl_divergence: float = Field(
        0.05, ge=0, description="mean over positions of the next token's distribution from the original's, in nats"
    )
    min_exact_match: float = Field(
        0.9,
        ge=0,
        le=1,
        description="held-out answers that greedy decoding gives exactly, as a share of the original's number",
    )
    max_weight_error: float = Field(
        0.4, ge=0, description="of any linear: difference of its weight from the original's, relative (Frobenius norms)"
    )
    min_range: float = Field(
        0.35, ge=0, description="of any scale of inputs or KV cache: the largest value it keeps, over the largest seen"
    )
    min_long_context_recall: float = Field(
        0.8, ge=0, le=1, description="answers recalled from long prompts, as a share of the original's number"
    )


class LimitSettings(Section):
    """Limits on requests."""

    max_sequence_length: Annotated[int | None, WITH_A_MODEL] = Field(
        None, ge=2, description="prompt and output; null: the model's own, or the compiled engine's"
    )
    default_max_tokens: int = Field(256, ge=1, description="max_tokens of a request that names none")
    max_prompt_bytes: int = Field(
        4 << 20, ge=1, description="bytes of text_input or messages, and of chat_template_kwargs"
    )
    max_words: int = Field(
        256,
        ge=1,
        description="elements of each input that lists words or end ids; stop_words_list and bad_words_list, where a "
        "word has two spellings, may have twice as many words",
    )
    max_words_bytes: int = Field(
        8192,
        ge=1,
        description="bytes of all words in one such input; stop_words_list and bad_words_list may have "
        "2 x (max_words + max_words_bytes) token ids",
    )
    max_return_sequences: int = Field(16, ge=1, description="largest num_return_sequences")


class Deployment(Section):
    """One deployment, resolved: ``model`` is an existing directory, or a GGUF file."""

    model: Path = Field(description="checkpoint directory, or GGUF file, relative to the deployment's own")
    decoupled: bool = Field(True, description="true: streaming; false: each request is answered exactly once (unary)")
    engine: EngineSettings = EngineSettings()
    kv_cache: KvCacheSettings = KvCacheSettings()
    batching: BatchingSettings = BatchingSettings()
    tensorrt_llm: TensorRtLlmSettings = TensorRtLlmSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    guided_decoding: GuidedDecodingSettings = GuidedDecodingSettings()
    quality: QualitySettings = QualitySettings()
    limits: LimitSettings = LimitSettings()
    observability: ObservabilitySettings = ObservabilitySettings()
    server: ServerSettings = ServerSettings()
    gateway: GatewaySettings = GatewaySettings()
    door: DoorSettings = DoorSettings()

    def max_sequence_length(self, own: int | None) -> int | None:
        """Return the tokens that a sequence has at most, where that is known without the engine.

        Args:
            own: the model's own limit; only the portable engine is sure to keep to it.
        """
        if self.engine.kind not in ("pytorch", "trtllm"):
            return None
        return self.limits.max_sequence_length or (own if self.engine.kind == "pytorch" else None)

    @property
    def most_guide_bytes(self) -> int:
        """Bytes of a guide beyond which the engine would refuse it."""
        return self.guided_decoding.max_guide_bytes if self.engine.kind == "pytorch" else MOST_GUIDE_BYTES

    @property
    def vouches(self) -> bool:
        """Whether the door, or the gateway by its API keys, says who asks."""
        return self.door.enabled or (self.gateway.enabled and self.gateway.api_keys_file is not None)

    @property
    def start_timeout_s(self) -> int:
        """Seconds until every stage must be ready."""
        return self.server.start_timeout_s or (3600 if self.engine.kind in ("trtllm", "tensorrtllm") else 600)

    @model_validator(mode="after")
    def _only_what_the_engine_reads(self) -> Deployment:
        for error in (*unread_keys(self, self.engine.kind), *_without_effect(self)):
            raise ValueError(error)
        return self


def _without_effect(deployment: Deployment) -> Iterator[str]:
    """Yield an error for each key that is given beside others that leave it without effect."""
    shown, settings = deployment.observability, deployment.tensorrt_llm
    if "trace_sample_ratio" in shown.model_fields_set and shown.trace_endpoint is None:
        yield "`observability.trace_sample_ratio` needs `observability.trace_endpoint`"
    level = shown.log_requests
    if level is not None and logging.getLevelName(level.upper()) < logging.getLevelName(shown.log_level.upper()):
        yield f"`observability.log_requests` needs `observability.log_level: {level}`; it is {shown.log_level}"
    if "max_lora_rank" in settings.model_fields_set and not settings.lora:
        yield "`tensorrt_llm.max_lora_rank` needs adapters in `tensorrt_llm.lora`"


def load_deployment(directory: Path) -> Deployment:
    """Read and validate ``directory/deployment.yaml``.

    Raises:
        DeploymentError: one line that names the file, the key, the value and what is allowed.
    """
    path = directory / FILE_NAME
    return resolve(read_settings(path), directory, str(path))


def load_served(directory: Path) -> Deployment:
    """Return the deployment as ``inflight serve`` serves it, with the door that its options have chosen.

    Raises:
        DeploymentError: as ``load_deployment`` does.
    """
    deployment = load_deployment(directory)
    enabled = os.environ.get(DOOR_VARIABLE, "on" if deployment.door.enabled else "off") == "on"
    return deployment.model_copy(update={"door": deployment.door.model_copy(update={"enabled": enabled})})


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings; they are not validated.

    Raises:
        DeploymentError: one line that names the file and what is wrong with it.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, AttributeError) as error:  # PyYAML raises these for a value such as 2024-13-01
        raise DeploymentError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise DeploymentError(f"{path}: a mapping of settings is expected")
    return data


def model_name(checkpoint: Path) -> str:
    """Return what to call the model of a checkpoint: its name, or the one above's where it says nothing.

    That is where it is `model`, or the commit of a model that was pulled; in the Hub's own cache commits lie in
    `models--org--name/snapshots`.
    """
    path = whole_path(checkpoint)
    name = title_of(path) if is_gguf(path) else path.name
    if not _SAYS_NOTHING.fullmatch(name):
        return readable(name)
    if path.parent.name == "snapshots":
        return readable(path.parent.parent.name.split("--", 2)[-1])
    return readable(path.parent.name)


def validate(data: dict[str, Any], source: str) -> Deployment:
    """Validate settings; paths stay as they are. ``source`` is named in errors.

    Raises:
        DeploymentError: one line that names the key, the value and what is allowed.
    """
    try:
        return Deployment.model_validate(data)
    except ValidationError as error:
        raise DeploymentError(f"{source}: {explain(error, Deployment)}") from None


def resolve(data: dict[str, Any], directory: Path, source: str) -> Deployment:
    """Validate settings and resolve their paths against ``directory``; ``source`` is named in errors."""
    deployment = validate(data, source)
    model = locate_model(_located(directory, deployment.model))
    if not (model.is_file() if is_gguf(model) else (model / "config.json").is_file()):
        raise DeploymentError(
            f"{source}: model: {model} is not a checkpoint directory (no config.json in it) and no GGUF file"
        )
    if is_gguf(model) and (kind := deployment.engine.kind) in ("trtllm", "tensorrtllm"):
        unread = f"{model} is a GGUF file, which engine.kind {kind} does not read; engine.kind pytorch does"
        raise DeploymentError(f"{source}: model: {unread}")
    settings, speculation, offload = deployment.tensorrt_llm, deployment.speculation, deployment.kv_cache.offload
    # Whoever uses what else is relative to the deployment checks that it exists.
    engine_dir, keys = settings.engine_dir, deployment.gateway.api_keys_file
    draft = speculation.draft_model and locate_model(_located(directory, speculation.draft_model))
    update: dict[str, Any] = {
        "engine_dir": engine_dir and _located(directory, engine_dir),
        "lora": {name: _located(directory, path) for name, path in settings.lora.items()},
    }
    file = offload.model_copy(update={"directory": offload.directory and _located(directory, offload.directory)})
    return deployment.model_copy(
        update={
            "model": model,
            "kv_cache": deployment.kv_cache.model_copy(update={"offload": file}),
            "gateway": deployment.gateway.model_copy(update={"api_keys_file": keys and _located(directory, keys)}),
            "door": deployment.door.located(lambda path: _located(directory, path)),
            "tensorrt_llm": settings.model_copy(update=update),
            "speculation": speculation.model_copy(update={"draft_model": draft}),
        }
    )


def _located(directory: Path, path: Path) -> Path:
    """Return the whole path of what a deployment names, in the form in which this process can open it.

    The stages run in a Python that Triton embeds and isolates: it takes ASCII for the encoding of file names, whatever
    the locale and the environment say, and encodes no other character. Bytes that it decoded itself it gives back.
    """
    return whole_path(directory / os.fsdecode(str(path).encode("utf-8", "surrogateescape")))
