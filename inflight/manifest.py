"""manifest.json: what a deployment was built from, by what, for which machine; and whether this machine is one.

It lies beside deployment.yaml. ``inflight build`` writes it, ``inflight serve`` and the engine hold it against the
deployment and the machine. It knows versions and files; not how an engine is built or served.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inflight.errors import DeploymentError
from inflight.machine import ComputeCapability, Machine, Versions
from inflight.settings.deployment import FILE_NAME as DEPLOYMENT
from inflight.settings.deployment import Deployment, load_deployment

FILE_NAME = "manifest.json"
SCHEMA_VERSION = 1

Flow = Literal["portable", "tensorrt", "pytorch"]

MINIMUM_COMPUTE_CAPABILITY: dict[str, ComputeCapability] = {"fp8": (8, 9), "w4a8-awq": (8, 9), "nvfp4": (10, 0)}
"""Precisions that need arithmetic which older chips lack. w4a8-awq multiplies in FP8."""
TENSORRT_LLM_LINE = "1.2"
"""The versions of TensorRT-LLM, major and minor, whose PyTorch flow and engines are served."""
TENSORRT_LLM_IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
"""The image that has Triton, its backends, and TensorRT-LLM of that line with its tools and examples."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Inputs(_Part):
    """SHA-256 of what went in."""

    checkpoint: str
    calibration: str | None = None
    settings: str


class FileRecord(_Part):
    """One file of the deployment."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Manifest(_Part):
    """What a deployment was built from, and for."""

    schema_version: Literal[1] = 1
    created: datetime
    command: str
    """The command that made it, and that rebuilds it."""
    engine: Literal["pytorch", "trtllm", "tensorrtllm"]
    flow: Flow
    """portable: no TensorRT-LLM; tensorrt: a compiled engine; pytorch: TensorRT-LLM on the checkpoint."""
    model: str
    precision: str
    inputs: Inputs
    versions: Versions
    gpu: str | None = None
    """Name of the GPU that it was built for; None: any."""
    compute_capability: ComputeCapability | None = None
    gpu_count: int = Field(1, ge=0)
    """GPUs that serve it: tensor times pipeline parallel size; 0: none."""
    plan: dict[str, Any] = {}
    quality: dict[str, float] = {}
    """Measured against the original checkpoint, by the names of the deployment's ``quality`` section."""
    files: dict[str, FileRecord] = {}
    """The deployment's files, by path relative to it."""


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Write ``directory/manifest.json``."""
    (directory / FILE_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Read ``directory/manifest.json``.

    Raises:
        DeploymentError: one line that names the file and what is wrong with it.
    """
    path = directory / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DeploymentError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        raise DeploymentError(f"{path}: not a manifest of schema version {SCHEMA_VERSION}; build the deployment again")
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(map(str, detail["loc"]))
        raise DeploymentError(f"{path}: `{key}`: {detail['msg'][:1].lower()}{detail['msg'][1:]}") from None


def check_deployment(directory: Path) -> None:
    """Hold the manifest in ``directory``, where there is one, against its files, deployment.yaml and this machine.

    Raises:
        DeploymentError: see ``require_files``, ``require_same`` and ``require_fit``.
    """
    if (directory / FILE_NAME).exists():
        manifest = read_manifest(directory)
        require_files(manifest, directory)
        require_same(manifest, load_deployment(directory), directory)
        require_fit(manifest, Machine.detect())


def require_files(manifest: Manifest, directory: Path) -> None:
    """Require every file of the manifest, in its size; to hash them all would make a start take minutes.

    Raises:
        DeploymentError: names the first that is missing or has another size.
    """
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise DeploymentError(f"{path} is missing; rebuild with: {manifest.command}")
        if (size := path.stat().st_size) != record.bytes:
            raise DeploymentError(
                f"{path} has {size} bytes, its manifest says {record.bytes}; rebuild with: {manifest.command}"
            )


def require_same(manifest: Manifest, deployment: Deployment, directory: Path) -> None:
    """Require that ``directory``'s deployment.yaml still serves what was built.

    Raises:
        DeploymentError: says what was edited away from the build, and the command that rebuilds it.
    """
    settings = deployment.tensorrt_llm
    flow = _FLOWS.get(deployment.engine.kind, "portable")
    differences = []
    if flow != manifest.flow:
        kind = deployment.engine.kind
        differences.append(f"built for {_NAMES[manifest.flow]}, served by {_NAMES[flow]} (engine.kind {kind})")
    elif flow != "portable" and settings.ranks != manifest.gpu_count:
        sizes = f"tensor_parallel_size {settings.tensor_parallel_size} x {settings.pipeline_parallel_size} stages"
        differences.append(f"built for {manifest.gpu_count} GPUs, served on {settings.ranks} ({sizes})")
    if flow == manifest.flow == "tensorrt" and settings.engine_dir is not None:
        engine = settings.engine_dir / "config.json"
        if engine not in {(directory / name).resolve() for name in manifest.files}:
            differences.append(f"tensorrt_llm.engine_dir {settings.engine_dir} is not what was built")
    if differences:
        raise DeploymentError(
            f"{directory / DEPLOYMENT} is not what its {FILE_NAME} describes: {'; '.join(differences)}; "
            f"rebuild it with: {manifest.command}"
        )


def require_fit(manifest: Manifest, machine: Machine) -> None:
    """Require that this machine can serve what the manifest describes.

    A compiled engine is bound to compute capability, TensorRT and TensorRT-LLM versions, the number of GPUs, and a
    driver that is not older; the PyTorch flow to TensorRT-LLM's line, and a chip that has the precision. The CUDA
    version that is recorded is the driver's: a driver that is not older has one that is not older.

    Raises:
        DeploymentError: says all that differs, and the command that rebuilds it; or why the GPUs cannot be seen.
    """
    if machine.blindness is not None and manifest.flow != "portable":
        raise DeploymentError(f"the GPUs of this machine cannot be seen: {machine.blindness}")
    differences = list(_differences(manifest, machine))
    if differences:
        raise DeploymentError(
            f"this {_WHAT[manifest.flow]} was built for another machine: {'; '.join(differences)}; "
            f"rebuild it here with: {manifest.command}"
        )


def record_files(directory: Path) -> dict[str, FileRecord]:
    """Return a record of every file under ``directory``, except the manifest itself, by relative path."""
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file() and path != directory / FILE_NAME)
    return {
        path.relative_to(directory).as_posix(): FileRecord(bytes=path.stat().st_size, sha256=hash_file(path))
        for path in paths
    }


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_FLOWS: dict[str, Flow] = {"trtllm": "pytorch", "tensorrtllm": "tensorrt"}
_NAMES = {"portable": "the portable engine", "tensorrt": "a TensorRT engine", "pytorch": "TensorRT-LLM's PyTorch flow"}
_WHAT = {"portable": "deployment", "tensorrt": "TensorRT engine", "pytorch": "TensorRT-LLM checkpoint"}


def _differences(manifest: Manifest, machine: Machine) -> Iterator[str]:
    """Yield what keeps the machine from serving it, each as "what the manifest says, here what the machine has"."""
    if manifest.flow == "portable":
        return
    if len(machine.gpus) < manifest.gpu_count:
        yield f"GPUs {manifest.gpu_count}, here {len(machine.gpus)}"
    chips = sorted(set(machine.compute_capabilities[: manifest.gpu_count]))
    if manifest.flow == "tensorrt":
        yield from _engine_differences(manifest, machine.versions, chips)
        return
    if _release(machine.versions.tensorrt_llm)[:2] != _release(TENSORRT_LLM_LINE):
        yield f"TensorRT-LLM {TENSORRT_LLM_LINE}.x, here {machine.versions.tensorrt_llm or 'none'}"
    needed = MINIMUM_COMPUTE_CAPABILITY.get(manifest.precision, (0, 0))
    for chip in chips:
        if chip < needed:
            yield f"compute capability {dotted(needed)} or newer for {manifest.precision}, here {dotted(chip)}"


def _engine_differences(manifest: Manifest, here: Versions, chips: list[ComputeCapability]) -> Iterator[str]:
    built = manifest.versions
    for chip in chips:
        if chip != manifest.compute_capability:
            wanted = dotted(manifest.compute_capability) if manifest.compute_capability else "unknown"
            yield f"compute capability {wanted} ({manifest.gpu or 'unknown GPU'}), here {dotted(chip)}"
    if built.tensorrt is None or _release(here.tensorrt)[:3] != _release(built.tensorrt)[:3]:
        yield f"TensorRT {built.tensorrt or 'unknown'}, here {here.tensorrt or 'none'}"
    if built.tensorrt_llm is None or _public(here.tensorrt_llm) != _public(built.tensorrt_llm):
        yield f"TensorRT-LLM {built.tensorrt_llm or 'unknown'}, here {here.tensorrt_llm or 'none'}"
    if _release(here.driver) < _release(built.driver):
        yield f"driver {built.driver} or newer, here {here.driver or 'none'}"


def _release(version: str | None) -> tuple[int, ...]:
    """Return the numbers that a version begins with."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(map(int, match[0].split("."))) if match else ()


def _public(version: str | None) -> str | None:
    """Return a version without its local part: "1.2.1+cu13" is 1.2.1, "1.2.0rc8" is not 1.2.0."""
    return version and version.partition("+")[0]


def dotted(capability: ComputeCapability) -> str:
    """Return a compute capability as NVIDIA writes it, such as ``8.9``."""
    return f"{capability[0]}.{capability[1]}"
