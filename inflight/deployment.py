"""A deployment: one directory with one configuration file, ``deployment.yaml``, validated and frozen.

Every key has a type, a default and a one-line description; docs/deployment.md is written from them. An unknown or wrong
key stops the start with its name, what is allowed, and the nearest known key.
This module knows the names and limits of settings, not what they do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inflight.errors import DeploymentError, nearest

FILE_NAME = "deployment.yaml"
ENVIRONMENT_VARIABLE = "INFLIGHT_DEPLOYMENT"
"""Names the deployment's directory to the stages; set by ``inflight serve``."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineSettings(_Section):
    """The portable engine."""

    kind: Literal["pytorch", "replay"] = Field(
        "pytorch", description="replay: answer with the prompt's own tokens, without a model, to measure the stages"
    )
    replay_step_ms: float = Field(0, ge=0, description="how long a step of the replay engine takes")
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto: a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="weights; auto: the checkpoint's own type, float16 as float32"
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of the engine; null: all cores but one")


class KvCacheSettings(_Section):
    """The paged KV cache."""

    block_size: int = Field(16, ge=1, le=256, description="tokens per block")
    tokens: int | None = Field(
        None, ge=1, description="capacity in tokens; null: enough for a full batch of 1,024 each"
    )
    prefix_reuse: bool = Field(True, description="keep finished blocks and reuse them for equal prefixes")


class BatchingSettings(_Section):
    """The scheduler."""

    max_batch_size: int = Field(32, ge=1, le=4096, description="sequences that run at once")
    max_tokens_per_step: int = Field(512, ge=1, description="token budget of one step, prefill and decode together")
    policy: Literal["guaranteed_no_evict", "max_utilization"] = Field(
        "guaranteed_no_evict", description="reserve a request's blocks at admission, or preempt when they run out"
    )
    max_queue_size: int = Field(256, ge=1, description="requests that may wait; one more is refused")


class LimitSettings(_Section):
    """Limits on requests."""

    max_sequence_length: int | None = Field(None, ge=2, description="prompt and output; null: the model's own limit")
    default_max_tokens: int = Field(256, ge=1, description="max_tokens of a request that names none")
    max_prompt_bytes: int = Field(4 << 20, ge=1, description="bytes of text_input or messages")
    max_words: int = Field(256, ge=1, description="stop_words of a request, and bad_words of a request")
    max_return_sequences: int = Field(16, ge=1, description="largest num_return_sequences")


class ServerSettings(_Section):
    """Where the server listens."""

    host: str = Field("127.0.0.1", description="address to bind")
    http_port: int = Field(8000, ge=1, le=65535, description="HTTP port")
    grpc_port: int = Field(8001, ge=1, le=65535, description="gRPC port")
    metrics_port: int = Field(8002, ge=1, le=65535, description="Prometheus metrics port")
    exit_timeout_s: int = Field(30, ge=1, description="seconds that running requests get at shutdown")


class Deployment(_Section):
    """One deployment, resolved: ``model`` is an existing directory."""

    model: Path = Field(description="checkpoint directory, relative to the deployment's own")
    decoupled: bool = Field(True, description="true: streaming; false: each request is answered exactly once (unary)")
    engine: EngineSettings = EngineSettings()
    kv_cache: KvCacheSettings = KvCacheSettings()
    batching: BatchingSettings = BatchingSettings()
    limits: LimitSettings = LimitSettings()
    server: ServerSettings = ServerSettings()


def load_deployment(directory: Path) -> Deployment:
    """Read and validate ``directory/deployment.yaml``.

    Raises:
        DeploymentError: one line that names the file, the key, the value and what is allowed.
    """
    path = directory / FILE_NAME
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DeploymentError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise DeploymentError(f"{path}: a mapping of settings is expected, with at least `model:`")
    return resolve(data, directory, str(path))


def resolve(data: dict[str, Any], directory: Path, source: str) -> Deployment:
    """Validate settings and resolve the model's path against ``directory``; ``source`` is named in errors."""
    try:
        deployment = Deployment.model_validate(data)
    except ValidationError as error:
        raise DeploymentError(f"{source}: {_explain(error)}") from None
    model = (directory / deployment.model).resolve()
    if not (model / "config.json").is_file():
        raise DeploymentError(f"{source}: model: {model} is not a checkpoint directory (no config.json in it)")
    return deployment.model_copy(update={"model": model})


def _explain(error: ValidationError) -> str:
    """Say every fault of a configuration in one line."""
    return "; ".join(
        _explain_one(detail["loc"], detail["type"], detail["msg"], detail["input"]) for detail in error.errors()
    )


def _explain_one(location: tuple[int | str, ...], kind: str, message: str, value: Any) -> str:
    key = ".".join(map(str, location))
    if kind == "extra_forbidden":
        return f"unknown key `{key}`{nearest(str(location[-1]), _known_keys(location[:-1]))}"
    if kind == "missing":
        return f"`{key}` is missing"
    return f"`{key}` is {value!r}: {message[:1].lower()}{message[1:]}"


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = Deployment
    for part in location:
        section = section.model_fields[str(part)].annotation  # type: ignore[assignment]
    return list(section.model_fields)
