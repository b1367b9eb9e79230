"""A model with the kernels in its layers: it computes what it did, in fewer launches. By Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from benchmarks.traffic import layer_traffic
from inflight.engine import model_runner
from inflight.engine.attention.torch_backend import QueryRange, TorchAttention
from inflight.engine.attention.triton_backend import BlockTables, StepLayout, TritonAttention
from inflight.engine.cuda import fp8
from inflight.engine.cuda.fp8 import use_scaled_mm
from inflight.engine.cuda.layers import fuse_layers
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.reading import read_model_config
from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.convert import convert_linears
from inflight.engine.transfer import TokenIds
from tests.engine.support.checkpoints import checkpoint as made
from tests.engine.support.driving import load

CPU = torch.device("cpu")
_VIEWS = set("_unsafe_view alias as_strided detach expand select slice split split_with_sizes t transpose view".split())
"""Operators that launch nothing; allocating does not either."""
SPANS = [QueryRange(0, 0, 5, [3, 1]), QueryRange(5, 0, 1, [7]), QueryRange(6, 0, 9, [0, 9, 4])]
TOKENS = [5, 6, 7, 8, 9, 20, *range(30, 39)]


def _by_kernels(model: DecoderModel, cache: KvPool, ranges: list[QueryRange], tokens: list[int]) -> Tensor:
    ids, layout = StepLayout.of(TokenIds(tokens), ranges, BlockTables(len(ranges), 8, 4, CPU))
    return model(ids, layout.positions, TritonAttention(cache.layers, layout, 4))


@pytest.mark.sweep(most=3)
@pytest.mark.proof
@pytest.mark.parametrize(
    "name",
    [
        "llama, biases, tied",
        "mistral",
        "qwen3",
        "gemma3, tied, linear",
        "phi3, partial, windows",
        "phi3, longrope",
        "qwen3moe",
        "qwen2moe",
    ],
)
def test_hidden_states_are_those_of_the_plain_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "pack_linears", lambda model: None)  # on a GPU they stay as they are
    runner = load(made(name), cpu_step="pytorch", num_blocks=16)._runner
    with torch.inference_mode():
        _check(runner._model, runner._kv_pool)


def _check(model: DecoderModel, cache: KvPool) -> None:
    def by_pytorch() -> Tensor:
        attend = TorchAttention(cache, SPANS, 4)
        return model(torch.tensor(TOKENS), attend.positions, attend)

    expected, stored = by_pytorch(), cache.parts[0].clone()
    assert stored.any()
    fuse_layers(model)
    for compute in (by_pytorch, lambda: _by_kernels(model, cache, SPANS, TOKENS)):
        cache.parts[0].zero_()
        seen = compute()
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cache.parts[0], stored, rtol=1e-5, atol=1e-5)


class _Operators(TorchDispatchMode):
    """Counts PyTorch's operators that launch something."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in _VIEWS and not name.startswith(("empty", "new_empty")):
            self.counts["product" if name in ("mm", "addmm", "_scaled_mm") else name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def _launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count what would be launched on a GPU, products and PyTorch's other operators too; kernels of ours do not run."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    counts: Counter[str] = Counter()

    def counted(self: Any, *args: Any, **settings: Any) -> None:
        counts[self.fn.__name__.removesuffix("_kernel").removeprefix("_")] += 1

    with monkeypatch.context() as patch, _Operators(counts):
        patch.setattr(interpreter.GridExecutor, "__call__", counted)
        yield counts


def _model(layers: int, quantized: bool = False, **special: Any) -> DecoderModel:
    """Return a random model of 16 bits, its linears in FP8 where ``quantized``."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    sizes: dict[str, Any] = dict.fromkeys(names, 64) | {"num_hidden_layers": layers, "num_attention_heads": 4}
    sizes |= {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, "head_dim": 16}
    model = DecoderModel(read_model_config(sizes | special), 64).to(torch.bfloat16)
    if quantized:
        scheme = Quantization(LayerQuantization("FP8", 0), ("lm_head",), {}, fp8_kv_cache=False)
        convert_linears(model, scheme, (), exact=False)
    model.to_empty(device="cpu").requires_grad_(False)
    torch.manual_seed(layers)
    for name, parameter in model.named_parameters():
        if name.endswith("scale"):
            parameter.fill_(2.0**-5)
        else:
            parameter.copy_((torch.randn(parameter.shape) / 8 + (1 if "norm" in name else 0)).to(parameter.dtype))
    return model


@pytest.mark.parametrize("quantized", [False, True])
@torch.no_grad()  # in inference mode operators come undivided, and whether one only views cannot be told
def test_a_layer_is_nine_launches_beside_the_combination_of_splits(
    quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    ranges = [QueryRange(row, 9, 1, [row, 3 + row, 6 + row]) for row in range(3)]
    for layers in (1, 2):
        model = _model(layers, quantized)
        if quantized:
            assert use_scaled_mm(model) == 4 * layers
        fuse_layers(model)
        cache = KvPool(model.config, 16, 4, torch.bfloat16, CPU)
        ids, layout = StepLayout.of(TokenIds([1, 2, 3]), ranges, BlockTables(3, 8, 4, CPU))
        attend = TritonAttention(cache.layers, layout, 4)
        with _launches(monkeypatch) as launched:
            model(ids, layout.positions, attend)
        counts.append(launched)
    layer = counts[1] - counts[0]
    once = counts[0] - layer
    layer.pop("combine", None)  # how attention deals its work out is its own affair
    once.pop("plan", None)
    traffic = layer_traffic(model.config, 3, 30, quantized)
    assert layer == {kernel.name: kernel.launches for kernel in traffic}
    assert sum(layer.values()) == (10 if quantized else 9)
    assert once == {"embedding": 1, "add_rms_norm": 1}


@torch.no_grad()
def test_experts_are_six_launches_and_nothing_waits_for_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
    model = _model(1, **experts, moe_intermediate_size=32, norm_topk_prob=True)
    fuse_layers(model)
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    with _launches(monkeypatch) as launched:
        model.model.layers[0].mlp(x)
    assert launched == {"product": 1, "choose": 1, "deal": 1, "expert": 2, "mix": 1}


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@torch.inference_mode()
def test_fp8_products_get_from_norms_and_gates_what_they_would_make_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = _model(2, quantized=True), list[Tensor]()
    use_scaled_mm(model)
    cache = KvPool(model.config, 16, 4, torch.bfloat16, CPU)
    attend = TorchAttention(cache, SPANS, 4)

    def step() -> Tensor:
        return model(torch.tensor(TOKENS), attend.positions, attend).float()

    expected = step()
    fuse_layers(model)
    monkeypatch.setattr(fp8, "quantize", lambda x, scale, made=fp8.quantize: inputs.append(x) or made(x, scale))
    seen = step()
    assert len(inputs) == 2, "only what attention returns is quantized by itself"
    assert (seen - expected).norm() < 0.02 * expected.norm()
