"""``engine.batch_invariant``: its products, where it is refused, and that a CPU needs nothing for it."""

from __future__ import annotations

import json

import pytest
import torch

from inflight.engine import model_runner
from inflight.engine.checkpoint import load_config, load_model, outline_model
from inflight.engine.config import EngineConfig
from inflight.engine.cuda import prepare
from inflight.engine.cuda.prepare import require_invariance
from inflight.engine.models.config import ModelConfig
from inflight.engine.quant import decoding
from inflight.errors import DeploymentError
from inflight.settings.deployment import validate
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.compiling import compiled
from tests.engine.support.driving import ask, load, run

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(prepare, "has_compiler", lambda: True)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_it_is_refused_where_nobody_has_shown_it(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    said = "holds on GPUs of compute capability 9.0; cuda:0 has {}.{}".format(*capability)
    with pytest.raises(DeploymentError, match=said):
        require_invariance(GPU, 1, load_config(checkpoint("llama")))


def test_what_stands_against_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeploymentError, match="speculation.candidates is 3; with engine.batch_invariant .* must be 1"):
        require_invariance(GPU, 3, load_config(checkpoint("llama")))
    with pytest.raises(DeploymentError, match="for DeepseekV3ForCausalLM they have no latent attention"):
        require_invariance(GPU, 1, load_config(checkpoint("deepseek3")))
    monkeypatch.setattr(prepare, "has_compiler", lambda: False)
    with pytest.raises(DeploymentError, match="needs Triton's compiler"):
        require_invariance(GPU, 1, load_config(checkpoint("llama")))


def test_a_gpus_engine_asks_for_it_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def asked(device: torch.device, candidates: int, model: ModelConfig) -> None:
        raise Asked(device, candidates, model.architecture)

    monkeypatch.setattr(model_runner, "resolve_device", torch.device)
    monkeypatch.setattr(model_runner, "require_invariance", asked)
    with pytest.raises(Asked) as seen:
        load(checkpoint("llama"), device="cuda:0", batch_invariant=True)
    assert seen.value.args == (GPU, 1, "LlamaForCausalLM")


@pytest.mark.usefixtures("rows_are_multiplied_alike")
@pytest.mark.parametrize(("columns", "depth"), [(70, 96), (33, 72)])
def test_a_row_of_a_product_does_not_depend_on_the_others(columns: int, depth: int) -> None:
    invariant = pytest.importorskip("inflight.engine.cuda.invariant")
    torch.manual_seed(0)
    x, weight, bias = torch.randn(40, depth), torch.randn(columns, depth), torch.randn(columns)
    few, many = invariant.ProductTile(16, 32, 64, 4, 2), invariant.ProductTile(32, 64, 32, 4, 2, masked=False)
    whole = invariant.product(x, weight, bias, many)
    torch.testing.assert_close(whole, x @ weight.t() + bias, rtol=1e-5, atol=1e-5)
    for count in (1, 5, 17):
        assert torch.equal(invariant.product(x[-count:], weight, bias, few), whole[-count:])
    plain = invariant.product(x[:3].t().contiguous().t(), weight)
    torch.testing.assert_close(plain, x[:3] @ weight.t(), rtol=1e-5, atol=1e-5)
    assert invariant.product(x[:0], weight).shape == (0, columns)


@pytest.mark.proof
def test_both_tiles_are_multiplied_by_one_instruction() -> None:
    pytest.importorskip("triton")
    kernels = [json.loads(line) for line in compiled("compile_products", 90)]
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel["wgmma"], kernel
        assert not kernel["mma"] + kernel["spilled"], kernel
        assert kernel["shared"] <= 227 << 10, "of a multiprocessor"


def test_all_products_of_a_model_become_invariant() -> None:
    invariant = pytest.importorskip("inflight.engine.cuda.invariant")
    directory = checkpoint("qwen2")  # it has biases, and its head is its embedding
    outline = outline_model(directory, load_config(directory), torch.float32, CPU, 64, "auto")
    model = load_model(outline, CPU).model
    x = torch.randn(5, model.config.hidden_size)
    expected = [model.model.layers[0].self_attn.qkv_proj(x), model.lm_head(x)]
    head = model.lm_head.weight
    assert invariant.use_invariant_products(model) == 1 + 4 * model.config.num_layers
    assert model.lm_head.weight is head
    assert not [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    for seen, wanted in zip([model.model.layers[0].self_attn.qkv_proj(x), model.lm_head(x)], expected, strict=True):
        torch.testing.assert_close(seen, wanted, rtol=1e-5, atol=1e-5)


def test_no_fp8_products_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from inflight.engine.cuda import fp8

    taken: list[object] = []
    model = torch.nn.Module()
    model.dtype = torch.bfloat16
    monkeypatch.setattr(fp8, "use_scaled_mm", lambda model: taken.append(model) or 0)
    monkeypatch.setattr(decoding, "free_memory", lambda _: 1 << 40)
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


@pytest.mark.parametrize("kind", ["trtllm", "tensorrtllm", "replay"])
def test_other_kinds_refuse_it(kind: str) -> None:
    for value in (True, False):
        with pytest.raises(DeploymentError, match="`engine.batch_invariant` needs"):
            validate({"model": ".", "engine": {"kind": kind, "batch_invariant": value}}, "")
    deployment = validate({"model": ".", "engine": {"batch_invariant": True}}, "")
    assert EngineConfig.of(deployment).batch_invariant
