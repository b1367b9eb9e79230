"""``engine.batch_invariant``: what it asks of cuBLAS, where it is refused, and that a CPU needs nothing for it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from inflight.engine import model_runner
from inflight.engine.config import EngineConfig
from inflight.engine.cuda import prepare
from inflight.engine.cuda.prepare import require_invariance
from inflight.errors import DeploymentError
from inflight.settings.deployment import validate
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.driving import ask, load, run

GPU = torch.device("cuda", 0)
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back as it was
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(prepare, "has_compiler", lambda: True)
    products = torch.backends.cuda.matmul
    yield
    products.allow_bf16_reduced_precision_reduction = (True, True)
    products.allow_fp16_reduced_precision_reduction = (True, True)


def test_cublas_is_left_no_room_to_split_sums() -> None:
    require_invariance(GPU, 1)
    assert {name: os.environ[name] for name in VARIABLES} == VARIABLES
    products = torch.backends.cuda.matmul
    for name in ("bf16", "fp16"):
        assert not getattr(products, f"allow_{name}_reduced_precision_reduction")
        assert not getattr(products, f"allow_{name}_reduced_precision_reduction_split_k")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_it_is_refused_where_nobody_has_shown_it(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    said = "holds on GPUs of compute capability 9.0; cuda:0 has {}.{}".format(*capability)
    with pytest.raises(DeploymentError, match=said):
        require_invariance(GPU, 1)


def test_what_stands_against_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeploymentError, match="speculation.candidates is 3; with engine.batch_invariant .* must be 1"):
        require_invariance(GPU, 3)
    monkeypatch.setattr(prepare, "has_compiler", lambda: False)
    with pytest.raises(DeploymentError, match="needs Triton's compiler"):
        require_invariance(GPU, 1)
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    with pytest.raises(DeploymentError, match="needs CUBLASLT_WORKSPACE_SIZE=1; the environment says 4096"):
        require_invariance(GPU, 1)


def test_a_gpus_engine_asks_for_it_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def asked(device: torch.device, candidates: int) -> None:
        raise Asked(device, candidates)

    monkeypatch.setattr(model_runner, "resolve_device", torch.device)
    monkeypatch.setattr(model_runner, "require_invariance", asked)
    with pytest.raises(Asked) as seen:
        load(checkpoint("llama"), device="cuda:0", batch_invariant=True)
    assert seen.value.args == (GPU, 1)


def test_no_fp8_products_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from inflight.engine.cuda import fp8

    taken: list[object] = []
    model = torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(1, dtype=torch.bfloat16)})})
    monkeypatch.setattr(torch.nn.ModuleDict, "model", property(lambda self: self["model"]), raising=False)
    monkeypatch.setattr(torch.nn.ModuleDict, "norm", property(lambda self: self["norm"]), raising=False)
    monkeypatch.setattr(fp8, "use_scaled_mm", lambda model: taken.append(model) or 0)
    monkeypatch.setattr(prepare, "free_memory", lambda _: 1 << 40)
    prepare.prepare_weights(model, GPU, int, batch_invariant=True)  # type: ignore[arg-type]
    assert not taken
    prepare.prepare_weights(model, GPU, int)  # type: ignore[arg-type]
    assert taken == [model]


def test_a_cpu_needs_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "require_invariance", None)
    engine = load(checkpoint("llama"), batch_invariant=True)
    alone = run(engine, [ask([1, 2, 3], 4)]).popitem()[1].tokens
    first, *_ = requests = [ask([1, 2, 3], 4), *(ask([one, 9], 4) for one in range(7))]
    assert run(engine, requests)[first.key].tokens == alone
    assert not os.environ.keys() & VARIABLES.keys()


@pytest.mark.parametrize("kind", ["trtllm", "tensorrtllm", "replay"])
def test_other_kinds_refuse_it(kind: str) -> None:
    for value in (True, False):
        with pytest.raises(DeploymentError, match="`engine.batch_invariant` needs"):
            validate({"model": ".", "engine": {"kind": kind, "batch_invariant": value}}, "")
    deployment = validate({"model": ".", "engine": {"batch_invariant": True}}, "")
    assert EngineConfig.of(deployment).batch_invariant
