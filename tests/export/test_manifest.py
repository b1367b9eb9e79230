"""manifest.json: written, read, and held against machines that fit and machines that do not."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inflight.errors import DeploymentError
from inflight.machine import Machine, Versions
from inflight.manifest import (
    FileRecord,
    Inputs,
    Manifest,
    check_deployment,
    read_manifest,
    record_files,
    require_files,
    require_fit,
    require_same,
    write_manifest,
)
from inflight.resources import DEMO
from inflight.settings.deployment import Deployment, resolve
from tests.support.tables import each_row

HASH = "0" * 64
BUILT = Versions(tensorrt_llm="1.2.1", tensorrt="10.14.1.48", driver="590.44.01", cuda="13.1", inflight="0.1.0")
REBUILD = "inflight build llama --gpu h100 --precision fp8"


def manifest(flow: str = "tensorrt", **changes: Any) -> Manifest:
    engine = {"portable": "pytorch", "pytorch": "trtllm"}.get(flow, "tensorrtllm")
    values: dict[str, Any] = {
        "created": datetime(2026, 7, 1, tzinfo=UTC),
        "command": REBUILD,
        "engine": engine,
        "flow": flow,
        "model": "llama",
        "precision": "fp8",
        "inputs": Inputs(checkpoint=HASH, settings=HASH),
        "versions": BUILT,
        "gpu": "NVIDIA H100 80GB HBM3",
        "compute_capability": (9, 0),
    }
    return Manifest(**(values | changes))


def machine(*capabilities: tuple[int, int], **versions: str | None) -> Machine:
    here = BUILT.model_copy(update=versions)
    return Machine(here, tuple("a GPU" for _ in capabilities), capabilities)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/weights").write_bytes(b"abc")
    written = manifest(files=record_files(tmp_path), plan={"max_batch_size": 8}, quality={"max_kl_divergence": 0.01})
    write_manifest(written, tmp_path)
    assert read_manifest(tmp_path) == written
    assert written.files["checkpoint/weights"].bytes == 3
    assert written.files["checkpoint/weights"].sha256.startswith("ba7816bf")  # SHA-256 of "abc", FIPS 180-2
    assert record_files(tmp_path) == written.files, "the manifest is not among its own files"


@each_row("flow", ["tensorrt", "pytorch"])
def test_the_machine_that_built_it_fits(flow: str) -> None:
    require_fit(manifest(flow), machine((9, 0)))
    require_fit(manifest(flow), machine((9, 0), (9, 0)))
    require_fit(manifest(flow), machine((9, 0), driver="595.10"))
    require_fit(manifest(flow), machine((9, 0), tensorrt_llm="1.2.1+cu13"))


@each_row(
    ("here", "reason"),
    [
        (machine((8, 9)), r"compute capability 9.0 \(NVIDIA H100 80GB HBM3\), here 8.9"),
        (machine((9, 0), tensorrt="10.13.3.9"), "TensorRT 10.14.1.48, here 10.13.3.9"),
        (machine((9, 0), tensorrt="10.14.2.1"), "TensorRT 10.14.1.48, here 10.14.2.1"),
        (machine((9, 0), tensorrt_llm="1.2.0"), "TensorRT-LLM 1.2.1, here 1.2.0"),
        (machine((9, 0), tensorrt_llm="1.2.1rc1"), "TensorRT-LLM 1.2.1, here 1.2.1rc1"),
        (machine((9, 0), tensorrt_llm=None), "TensorRT-LLM 1.2.1, here none"),
        (machine((9, 0), driver="580.95.05"), "driver 590.44.01 or newer, here 580.95.05"),
        (machine(), "GPUs 1, here 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_on_another_machine_is_refused(here: Machine, reason: str) -> None:
    with pytest.raises(DeploymentError, match=reason) as caught:
        require_fit(manifest(), here)
    assert str(caught.value).endswith(f"rebuild it here with: {REBUILD}")
    assert str(caught.value).count(", here ") == 1, "only what differs"


def test_all_that_differs_is_said_at_once() -> None:
    with pytest.raises(DeploymentError) as caught:
        require_fit(manifest(gpu_count=2), machine((10, 0), tensorrt="11.0.0.1", tensorrt_llm="1.3.0", driver="1.0"))
    assert str(caught.value).count(", here ") == 5


def test_a_build_of_the_same_tensorrt_fits() -> None:
    require_fit(manifest(), machine((9, 0), tensorrt="10.14.1.50"))


@each_row(
    ("here", "reason"),
    [
        (machine((8, 0)), "compute capability 8.9 or newer for fp8, here 8.0"),
        (machine((9, 0), tensorrt_llm="1.3.0"), "TensorRT-LLM 1.2.x, here 1.3.0"),
        (machine((9, 0), tensorrt_llm="1.1.0"), "TensorRT-LLM 1.2.x, here 1.1.0"),
        (machine((9, 0), tensorrt_llm=None), "TensorRT-LLM 1.2.x, here none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_checkpoint_needs_the_line_and_the_precision(here: Machine, reason: str) -> None:
    with pytest.raises(DeploymentError, match=reason):
        require_fit(manifest("pytorch"), here)


def test_a_checkpoint_moves_between_chips_and_versions_of_the_line() -> None:
    require_fit(manifest("pytorch"), machine((10, 0), tensorrt_llm="1.2.0", tensorrt=None, driver="580.0"))
    require_fit(manifest("pytorch", precision="int4-awq"), machine((8, 0)))


def test_a_portable_deployment_fits_anywhere() -> None:
    require_fit(manifest("portable", compute_capability=None, gpu_count=0), Machine(Versions()))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a manifest of schema version 1"),
        ('{"schema_version": 2}', "not a manifest of schema version 1; build the deployment again"),
        ('{"schema_version": 1}', "`created`: field required"),
    ],
)
def test_a_broken_manifest_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DeploymentError, match=f"manifest.json: {reason}") as caught:
        check_deployment(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_and_a_wrong_value_are_named(tmp_path: Path) -> None:
    data = json.loads(manifest().model_dump_json())
    for change, reason in (({"extra": 1}, "`extra`"), ({"flow": "cuda"}, "`flow`"), ({"gpu_count": -1}, "`gpu_count`")):
        (tmp_path / "manifest.json").write_text(json.dumps(data | change))
        with pytest.raises(DeploymentError, match=reason):
            read_manifest(tmp_path)
    with pytest.raises(DeploymentError, match="cannot be read"):
        read_manifest(tmp_path / "nowhere")


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    described = manifest(files={"engine/rank0.engine": FileRecord(bytes=3, sha256=HASH)})
    with pytest.raises(DeploymentError, match=r"rank0.engine is missing; rebuild with: inflight build llama"):
        require_files(described, tmp_path)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/rank0.engine").write_bytes(b"ab")
    with pytest.raises(DeploymentError, match=r"rank0.engine has 2 bytes, its manifest says 3"):
        require_files(described, tmp_path)


def test_a_deployment_without_a_manifest_is_not_held_to_one(tmp_path: Path) -> None:
    check_deployment(tmp_path)


def deployed(directory: Path, kind: str, **tensorrt_llm: Any) -> Deployment:
    """Return a deployment with an engine in ``directory/engine``, that a build has written."""
    settings = {"tensorrt_llm": tensorrt_llm} if tensorrt_llm else {}
    return resolve({"model": str(DEMO / "model"), "engine": {"kind": kind}} | settings, directory, "test")


ENGINE = {"engine/config.json": FileRecord(bytes=2, sha256=HASH)}


def test_what_was_built_is_what_is_served(tmp_path: Path) -> None:
    require_same(manifest("tensorrt", files=ENGINE), deployed(tmp_path, "tensorrtllm", engine_dir="engine"), tmp_path)
    require_same(manifest("pytorch", gpu_count=4), deployed(tmp_path, "trtllm", tensor_parallel_size=4), tmp_path)
    require_same(manifest("portable", gpu_count=0), deployed(tmp_path, "pytorch"), tmp_path)


@pytest.mark.parametrize(
    ("built", "kind", "settings", "reason"),
    [
        ("portable", "trtllm", {}, r"built for the portable engine, served by TensorRT-LLM's PyTorch flow"),
        ("pytorch", "tensorrtllm", {"engine_dir": "engine"}, "served by a TensorRT engine .engine.kind tensorrtllm"),
        ("tensorrt", "trtllm", {"tensor_parallel_size": 1}, "built for a TensorRT engine, served by TensorRT-LLM's"),
        ("tensorrt", "tensorrtllm", {"engine_dir": "other"}, "engine_dir .*other is not what was built"),
        ("pytorch", "trtllm", {"tensor_parallel_size": 2}, "built for 1 GPUs, served on 2"),
        (
            "tensorrt",
            "tensorrtllm",
            {"engine_dir": "engine", "pipeline_parallel_size": 3},
            "built for 1 GPUs, served on 3",
        ),
    ],
)
def test_a_deployment_that_was_edited_away_from_its_build(
    tmp_path: Path, built: str, kind: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DeploymentError, match=reason) as caught:
        require_same(manifest(built, files=ENGINE), deployed(tmp_path, kind, **settings), tmp_path)
    assert str(caught.value).endswith(f"rebuild it with: {REBUILD}")


def test_the_check_reads_the_deployment(tmp_path: Path) -> None:
    settings = f"model: {DEMO / 'model'}\nengine: {{kind: trtllm}}\n"
    (tmp_path / "deployment.yaml").write_text(settings)
    write_manifest(manifest("portable", compute_capability=None, gpu_count=0), tmp_path)
    with pytest.raises(DeploymentError, match=r"deployment.yaml is not what its manifest.json describes"):
        check_deployment(tmp_path)
    (tmp_path / "deployment.yaml").write_text(settings.replace("trtllm", "pytorch"))
    check_deployment(tmp_path)


class Driver(ModuleType):
    """A stand-in for NVML: two chips."""

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return ("NVIDIA H100 80GB HBM3", "NVIDIA L4")[handle]

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return ((9, 0), (8, 9))[handle]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "590.44.01"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010


def test_the_machine_is_what_the_driver_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Driver("pynvml"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here = Machine.detect()
    assert here.compute_capabilities == ((9, 0), (8, 9))
    assert (here.versions.driver, here.versions.cuda) == ("590.44.01", "13.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert Machine.detect().gpus == ("NVIDIA L4",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Machine.detect().gpus == ()


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    here = Machine.detect()
    assert (here.gpus, here.versions.driver) == ((), None)
    assert here.versions.inflight
    with pytest.raises(DeploymentError, match=r"cannot be seen: NVML's Python binding is missing; .* nvidia-ml-py$"):
        require_fit(manifest(), here)
    require_fit(manifest("portable", compute_capability=None, gpu_count=0), here)


def test_a_driver_that_does_not_answer_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(Driver, "nvmlInit", lambda self: (_ for _ in ()).throw(RuntimeError("Driver Not Loaded")))
    with pytest.raises(DeploymentError, match="cannot be seen: NVML says: Driver Not Loaded"):
        require_fit(manifest(), Machine.detect())
