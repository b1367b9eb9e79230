"""A deployment: one directory with one configuration file, ``deployment.yaml``, validated and frozen.

Every key has a type, a default and a one-line description; docs/deployment.md is written from them. An unknown or wrong
key stops the start with its name, what is allowed, and the nearest known key.
This module knows the names and limits of settings, not what they do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from inflight.batching import BatchingSettings
from inflight.errors import DeploymentError, readable
from inflight.explain import explain
from inflight.kv_cache import KvCacheSettings
from inflight.observability import ObservabilitySettings
from inflight.speculation import PORTABLE_METHODS, SpeculationSettings

FILE_NAME = "deployment.yaml"
ENVIRONMENT_VARIABLE = "INFLIGHT_DEPLOYMENT"
"""Names the deployment's directory to the stages; set by ``inflight serve``."""
Milliseconds = Annotated[float, Field(ge=0, le=3_600_000, allow_inf_nan=False)]
"""At most an hour: what takes longer is a slip of the unit."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineSettings(_Section):
    """Which engine, and the portable one's device."""

    kind: Literal["pytorch", "trtllm", "tensorrtllm", "replay"] = Field(
        "pytorch",
        description="pytorch: the portable engine; trtllm: TensorRT-LLM's PyTorch flow on the checkpoint, by its LLM "
        "API; tensorrtllm: a compiled engine, by upstream's C++ backend; replay: answer with the prompt's own tokens, "
        "without a model, to measure the stages",
    )
    replay_queue_ms: Milliseconds = Field(0, description="how long a request waits in the replay engine, at least")
    replay_prefill_ms: Milliseconds = Field(0, description="its time from being scheduled to the first token")
    replay_step_ms: Milliseconds = Field(
        0, description="its time from each token to the next; alone, the step of one clock for all requests"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto: a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="of the computation, and of weights that are not quantized; auto: the checkpoint's own type, "
        "float16 as bfloat16 on a GPU, as float32 on a CPU",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; null: all cores but one")
    batch_invariant: bool = Field(
        False,
        description="tokens do not depend, even by rounding, on what else is computed with them. On a CPU that is so "
        "anyway; on a GPU of compute capability 9.0 (other GPUs refuse it) it costs time where the batch is small, and "
        "FP8 weights are decoded",
    )

    @field_validator("replay_queue_ms", "replay_prefill_ms", "replay_step_ms")
    @classmethod
    def _only_replay_has_a_set_pace(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("kind", "replay") != "replay":
            raise ValueError("it needs `kind: replay`; no other engine has a set pace")
        return value

    @field_validator("device")
    @classmethod
    def _a_device_that_is_known(cls, value: str) -> str:
        if not _DEVICE.fullmatch(value):
            raise ValueError("it must be cpu, cuda, cuda:N or auto")
        return value


class TensorRtLlmSettings(_Section):
    """TensorRT-LLM, for the engine kinds `trtllm` and `tensorrtllm`."""

    engine_dir: Path | None = Field(
        None, description="compiled TensorRT engine, relative to the deployment; `tensorrtllm` needs one"
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share each layer")
    pipeline_parallel_size: int = Field(1, ge=1, description="groups of GPUs that share the layers")
    free_gpu_memory_fraction: float = Field(
        0.9, gt=0, le=1, description="of the memory that weights leave, for the KV cache; kv_cache.tokens limits it too"
    )
    host_cache_bytes: int = Field(0, ge=0, description="host memory for KV blocks that leave the GPU; 0: none")
    cuda_graph_batch_sizes: list[int] | None = Field(
        None,
        description="decode batch sizes that get a CUDA graph; null: TensorRT-LLM's own choice; none beside `lora`",
    )
    sampler: Literal["trtllm", "torch"] = Field(
        "trtllm",
        description="trtllm: serves penalties, min_p, bad words and seeds; torch: serves "
        "num_top_log_probs, and is the only one beside speculation. What a sampler does not serve is refused",
    )
    guided_decoding: Literal["xgrammar", "llguidance"] | None = Field(
        None, description="what enforces JSON schemas, regular expressions and grammars; null: refused"
    )
    lora: dict[str, Path] = Field({}, description="LoRA adapters by name, relative to the deployment")
    max_lora_rank: int = Field(64, ge=1, description="largest rank among them")
    watchdog_s: float = Field(
        60, gt=0, description="without progress for so long while requests run, they fail and the server is not ready"
    )
    parameters: dict[str, str] = Field(
        {}, description="parameters of upstream's C++ backend that take the place of what the deployment implies"
    )


class QualitySettings(_Section):
    """What a quantized checkpoint may lose against the original; `inflight build` fails where it loses more."""

    max_perplexity_increase: float = Field(0.05, ge=0, description="of the held-out text, as a fraction")
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


class LimitSettings(_Section):
    """Limits on requests."""

    max_sequence_length: int | None = Field(
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


OperatorsApi = Literal["shared-memory", "trace", "logging"]
"""Parts of Triton's API that no request needs: who registers memory, or changes what is logged, rules the server."""


class ServerSettings(_Section):
    """Where the server listens."""

    host: str = Field("127.0.0.1", description="address to bind")
    http_port: int = Field(8000, ge=1, le=65535, description="HTTP port")
    grpc_port: int = Field(8001, ge=1, le=65535, description="gRPC port")
    metrics_port: int = Field(8002, ge=1, le=65535, description="Prometheus metrics port")
    start_timeout_s: int | None = Field(
        None,
        ge=1,
        description="seconds until every stage must be ready; null: 3600 with TensorRT-LLM, which loads, compiles and "
        "tunes first, and 600 with any other engine",
    )
    exit_timeout_s: int = Field(30, ge=1, description="seconds that running requests get at shutdown")
    open_apis: tuple[OperatorsApi, ...] = Field(
        (), description="operators' parts of Triton's API that anyone who reaches the ports may use; closed otherwise"
    )
    hang_timeout_s: float | None = Field(
        60,
        ge=5,
        le=3600,
        allow_inf_nan=False,
        description="a stage that waits in one step or call for so long hangs, and the server is started again; one "
        "that computes gets ten times as long. null: whatever stands still is left alone, for debuggers",
    )


class Deployment(_Section):
    """One deployment, resolved: ``model`` is an existing directory."""

    model: Path = Field(description="checkpoint directory, relative to the deployment's own")
    decoupled: bool = Field(True, description="true: streaming; false: each request is answered exactly once (unary)")
    engine: EngineSettings = EngineSettings()
    kv_cache: KvCacheSettings = KvCacheSettings()
    batching: BatchingSettings = BatchingSettings()
    tensorrt_llm: TensorRtLlmSettings = TensorRtLlmSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    quality: QualitySettings = QualitySettings()
    limits: LimitSettings = LimitSettings()
    observability: ObservabilitySettings = ObservabilitySettings()
    server: ServerSettings = ServerSettings()

    def max_sequence_length(self, own: int | None) -> int | None:
        """Return the tokens that a sequence has at most, where that is known without the engine.

        Args:
            own: the model's own limit; only the portable engine is sure to keep to it.
        """
        if self.engine.kind not in ("pytorch", "trtllm"):
            return None
        return self.limits.max_sequence_length or (own if self.engine.kind == "pytorch" else None)

    @property
    def start_timeout_s(self) -> int:
        """Seconds until every stage must be ready."""
        own = _TENSORRT_LLM_START_S if self.engine.kind in ("trtllm", "tensorrtllm") else _START_S
        return self.server.start_timeout_s or own

    @model_validator(mode="after")
    def _only_what_the_engine_reads(self) -> Deployment:
        for name, needs in _unread(self):
            raise ValueError(f"`{name}` needs {needs}")
        return self


_START_S, _TENSORRT_LLM_START_S = 600, 3600
"""``server.start_timeout_s``, unless it is set."""
_TRTLLM_ONLY = {"cuda_graph_batch_sizes", "sampler", "guided_decoding", "lora", "max_lora_rank", "watchdog_s"}
"""Settings of TensorRT-LLM that its LLM API reads, and upstream's C++ backend does not."""
_COMPILED_ONLY = ("medusa", "lookahead")
"""Methods of speculative decoding that compiled engines alone have."""
_COMPILED = "compiled engines are served by `engine.kind: tensorrtllm`"


def _unread(deployment: Deployment) -> Iterator[tuple[str, str]]:
    """Yield the settings that are given and would have no effect, each with what it needs."""
    kind, settings = deployment.engine.kind, deployment.tensorrt_llm
    for name, needs in deployment.observability.unread(kind):
        yield f"observability.{name}", needs
    for name, needs in deployment.batching.unread(kind):
        yield f"batching.{name}", needs
    for name, needs in deployment.kv_cache.unread(kind):
        yield f"kv_cache.{name}", needs
    portable, given = deployment.engine.model_fields_set, sorted(settings.model_fields_set)
    yield from _unread_speculation(deployment.speculation, kind)
    if kind not in ("trtllm", "tensorrtllm"):
        if kind == "replay" and "batch_invariant" in portable:
            yield "engine.batch_invariant", f"an engine with a model; `engine.kind` is {kind}"
        for name in given:
            yield f"tensorrt_llm.{name}", f"`engine.kind:` trtllm or tensorrtllm; it is {kind}"
        return
    for name in sorted(portable & {"batch_invariant", "device", "threads"}):
        yield f"engine.{name}", f"`engine.kind:` pytorch; it is {kind}"
    if kind == "trtllm" and settings.engine_dir is not None:
        yield "tensorrt_llm.engine_dir", f"another kind than trtllm: {_COMPILED}"
    for name in given:
        owner = "trtllm" if name in _TRTLLM_ONLY else "tensorrtllm" if name == "parameters" else kind
        if owner != kind:
            yield f"tensorrt_llm.{name}", f"`engine.kind:` {owner}; it is {kind}"
    if kind == "tensorrtllm" and "dtype" in portable:
        yield "engine.dtype", "the PyTorch flow; a compiled engine has its own"
    if "max_lora_rank" in given and not settings.lora:
        yield "tensorrt_llm.max_lora_rank", "adapters in `tensorrt_llm.lora`"


def _unread_speculation(settings: SpeculationSettings, kind: str) -> Iterator[tuple[str, str]]:
    if kind == "pytorch" and settings.method not in (None, *PORTABLE_METHODS):
        yield f"speculation.method: {settings.method}", f"`engine.kind:` trtllm or tensorrtllm; it is {kind}"
    if kind == "trtllm" and settings.method in _COMPILED_ONLY:
        yield f"speculation.method: {settings.method}", f"a compiled engine: {_COMPILED}"
    if kind == "replay":
        for name in sorted(settings.model_fields_set):
            yield f"speculation.{name}", f"an engine with a model; `engine.kind` is {kind}"
    for name in sorted({"adaptive", "candidates"} & settings.model_fields_set) if kind != "pytorch" else ():
        yield f"speculation.{name}", f"`engine.kind:` pytorch; it is {kind}"


def load_deployment(directory: Path) -> Deployment:
    """Read and validate ``directory/deployment.yaml``.

    Raises:
        DeploymentError: one line that names the file, the key, the value and what is allowed.
    """
    path = directory / FILE_NAME
    return resolve(read_settings(path), directory, str(path))


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings; they are not validated.

    Raises:
        DeploymentError: one line that names the file and what is wrong with it.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DeploymentError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise DeploymentError(f"{path}: a mapping of settings is expected")
    return data


def model_name(checkpoint: Path) -> str:
    """Return what to call the model of a checkpoint directory: its name, or the one above's where that is `model`."""
    path = checkpoint.resolve()
    return readable(path.parent.name if path.name == "model" else path.name)


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
    """Validate settings and resolve the model's path against ``directory``; ``source`` is named in errors."""
    deployment = validate(data, source)
    model = _located(directory, deployment.model)
    if not (model / "config.json").is_file():
        raise DeploymentError(f"{source}: model: {model} is not a checkpoint directory (no config.json in it)")
    return _resolve_paths(deployment.model_copy(update={"model": model}), directory)


def _located(directory: Path, path: Path) -> Path:
    """Return the whole path of what a deployment names, in the form in which this process can open it.

    The stages run in a Python that Triton embeds and isolates: it takes ASCII for the encoding of file names, whatever
    the locale and the environment say, and encodes no other character. Bytes that it decoded itself it gives back.
    """
    return (directory / os.fsdecode(str(path).encode("utf-8", "surrogateescape"))).resolve()


def _resolve_paths(deployment: Deployment, directory: Path) -> Deployment:
    """Resolve what else is relative to the deployment; whoever uses it checks that it exists."""
    settings, speculation, offload = deployment.tensorrt_llm, deployment.speculation, deployment.kv_cache.offload
    engine_dir, draft = settings.engine_dir, speculation.draft_model
    update: dict[str, Any] = {
        "engine_dir": engine_dir and _located(directory, engine_dir),
        "lora": {name: _located(directory, path) for name, path in settings.lora.items()},
    }
    file = offload.model_copy(update={"directory": offload.directory and _located(directory, offload.directory)})
    return deployment.model_copy(
        update={
            "kv_cache": deployment.kv_cache.model_copy(update={"offload": file}),
            "tensorrt_llm": settings.model_copy(update=update),
            "speculation": speculation.model_copy(update={"draft_model": draft and _located(directory, draft)}),
        }
    )
