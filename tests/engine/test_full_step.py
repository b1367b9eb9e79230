"""What a step takes is known before the KV cache takes the rest: cards of any size start, and the first batch fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engine import device, engine, factory, model_runner
from inflight.engine import sizing as memory
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.sequence import Sequence
from inflight.engine.sizing import choose_chunk, full_step, size_step
from inflight.engine.speculate.verification import sampling_rows
from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.settings.batching import ON_CPU, ON_GPU, StepSize, affordable_chunk
from inflight.settings.deployment import validate
from inflight.settings.speculation import SpeculationSettings
from inflight.text.tokenizer import Tokenizer
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import ask, load, run
from tests.engine.support.fake_card import FakeCard

GIB = 1 << 30
BOTH = frozenset({"max_batch_size", "max_tokens_per_step"})
CHUNK = frozenset({"prefill_chunk_tokens"})
AUTOMATIC = EngineConfig(
    Path(), max_batch_size=ON_GPU.sequences, max_tokens_per_step=ON_GPU.tokens, automatic=BOTH, kv_cache_fraction=0.9
)


def _card(monkeypatch: pytest.MonkeyPatch, total: int) -> FakeCard:
    """Return a card that the engine takes for its device's."""
    card = FakeCard(total)
    for module in (device, engine, model_runner):
        monkeypatch.setattr(module, "device_memory", lambda _: card)
    monkeypatch.setattr(memory, "_GRAPHS_BYTES", 0)  # there are no graphs
    monkeypatch.setattr(model_runner, "native_model", lambda *_: None)  # nor is there a CPU's step
    monkeypatch.setattr(model_runner, "pack_linears", lambda _: None)  # nor is anything packed for oneDNN
    return card


ALL: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
    "top_log_probs": 3,
}
"""What takes memory for each token of the vocabulary; but logits that a request gets, which leave the card at once."""


@pytest.mark.proof
def test_the_first_sampled_batch_fits_where_the_cache_has_all_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    card = _card(monkeypatch, 48 << 20)
    with card:
        served = load(DEMO / "model", kv_cache_fraction=0.995, max_batch_size=32, max_tokens_per_step=256)
        assert card.free() < card.total / 3, "the cache has most of it"
        served.warm_up()
        outputs = run(served, [ask([index] * 8, 4, seed=index, **ALL) for index in range(32)])
    assert [output.error for output in outputs.values()] == [None] * 32


@pytest.mark.proof
def test_a_warm_up_has_had_what_is_served_later(monkeypatch: pytest.MonkeyPatch) -> None:
    card = _card(monkeypatch, 256 << 20)
    with card:
        served = load(DEMO / "model", num_blocks=512, max_batch_size=32, max_tokens_per_step=256)
        warmed = card.peak_of(served.warm_up)
        prompts = [[index] * 8 for index in range(32)]
        needed = card.peak_of(lambda: run(served, [ask(prompt, 4, **ALL) for prompt in prompts]))
    assert needed <= 1.05 * warmed


MIB_PER_TOKEN, MIB_PER_ROW = 0.12, 3.5
"""About what a step of an 8B takes."""


class _Ruler:
    """A card by arithmetic: a step takes so much for each token and each sequence."""

    def __init__(self, free: float) -> None:
        self._free, self.tried = int(free * GIB), list[StepSize]()

    def free(self) -> int:
        return self._free

    def peak_of(self, compute: Callable[[], object]) -> int:
        compute()
        sequences, tokens = self.tried[-1]
        peak = int((MIB_PER_TOKEN * tokens + MIB_PER_ROW * sequences) * (1 << 20))
        if peak > self._free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return peak


@pytest.mark.parametrize(
    ("free", "size"),
    [(120, (256, 8192)), (60, (256, 8192)), (7, (128, 4096)), (4, (64, 2048)), (2, (32, 1024)), (0.4, (32, 512))],
)
def test_small_cards_get_smaller_steps(free: float, size: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    card = _Ruler(free)
    with caplog.at_level(logging.INFO):
        sized, peak = size_step(AUTOMATIC, card, card.tried.append)
    assert (sized.max_batch_size, sized.max_tokens_per_step) == size == card.tried[-1]
    assert peak == card.peak_of(lambda: None)
    lowered = f"batching.max_batch_size is {size[0]}, not 256, and max_tokens_per_step {size[1]}, not 8192"
    assert (lowered in caplog.text) == (size != ON_GPU)


def test_what_is_set_stays() -> None:
    card = _Ruler(1)
    one = EngineConfig(Path(), max_batch_size=96, max_tokens_per_step=8192, automatic=BOTH - {"max_batch_size"})
    sized, _ = size_step(one, card, card.tried.append)
    assert (sized.max_batch_size, sized.max_tokens_per_step) == (96, 512)
    both, card = EngineConfig(Path(), max_batch_size=96, max_tokens_per_step=4096), _Ruler(1)
    assert size_step(both, card, card.tried.append)[0] == both
    card = _Ruler(0.5)
    with pytest.raises(DeploymentError, match="not enough memory for a step of 4096 tokens and 96 sequences"):
        size_step(both, card, card.tried.append)
    card = _Ruler(0.1)
    with pytest.raises(DeploymentError, match="not enough memory for a step of 512 tokens and 32 sequences"):
        size_step(AUTOMATIC, card, card.tried.append)


@pytest.mark.proof
def test_a_small_card_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sizes that are its own, and serves."""
    card = _card(monkeypatch, 12 << 20)
    with card:
        served = load(
            checkpoint("llama"), kv_cache_fraction=0.9, max_batch_size=256, max_tokens_per_step=8192, automatic=BOTH
        )
        served.warm_up()
        outputs = run(served, [ask([1, 2, 3], 4, **ALL) for _ in range(40)])
    assert served.stats.batch_size_limit == served._config.max_batch_size < 256
    assert served.stats.step_tokens_limit < 8192
    assert [output.error for output in outputs.values()] == [None] * 40


@pytest.mark.parametrize(("size", "longest"), [((4, 4), 9), ((3, 40), 9), ((8, 20), 64), ((1, 5), 9), ((9, 4), 9)])
def test_a_full_step_is_full(size: tuple[int, int], longest: int) -> None:
    chunks = full_step(StepSize(*size), longest, 4, 3, 2)
    assert len(chunks) == min(size)
    assert sum(chunk.size for chunk in chunks) <= size[1]
    assert all(chunk.samples and chunk.size <= longest for chunk in chunks)
    assert sum(chunk.size for chunk in chunks) == size[1] or all(chunk.size == longest for chunk in chunks[1:])
    assert all(len(chunk.sequence.table.blocks) == -(-chunk.size // 4) for chunk in chunks if chunk.sequence.table)


@pytest.mark.parametrize(("size", "longest"), [((4, 24), 9), ((4, 6), 9), ((8, 64), 3), ((2, 40), 64), ((3, 3), 9)])
def test_a_full_step_checks_drafts(size: tuple[int, int], longest: int) -> None:
    chunks = full_step(StepSize(*size), longest, 4, 3, 2, drafts=4)
    most = min(4, size[1] // size[0] - 1, longest - 1)
    assert [len(chunk.drafts) for chunk in chunks] == [most] * min(size)
    assert len(sampling_rows(chunks)) == min(size) * (1 + most)
    assert all(chunk.samples and len(chunk.tokens) == chunk.size <= longest for chunk in chunks)
    assert sum(chunk.size for chunk in chunks) <= size[1]
    assert all(len(chunk.sequence.table.blocks) == -(-chunk.size // 4) for chunk in chunks if chunk.sequence.table)


@pytest.mark.proof
def test_a_batch_that_checks_drafts_fits_where_the_cache_has_all_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    card = _card(monkeypatch, 128 << 20)
    speculation = SpeculationSettings(method="ngram", max_draft_tokens=7, adaptive=False)
    with card:
        served = load(
            DEMO / "model",
            kv_cache_fraction=0.995,
            max_batch_size=32,
            max_tokens_per_step=256,
            speculation=speculation,
        )
        served.warm_up()
        assert served._speculator is not None
        served._speculator.draft_with(_Sevens())
        outputs = run(served, [ask([index] * 8, 12, seed=index, **ALL) for index in range(32)])
    assert [output.error for output in outputs.values()] == [None] * 32


class _Sevens:
    """Drafts as much as it may, whatever the tokens."""

    def prepare(self, wanted: Mapping[Sequence, int]) -> None: ...

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[list[int]]]:
        return {sequence: [[7] * count] for sequence, count in wanted.items()}

    def forget(self, sequence: Sequence) -> None: ...

    def reset(self) -> None: ...

    def check_idle(self) -> None: ...


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_sizes_suit_the_device_where_nothing_is_set(on_gpu: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = EngineConfig.of(validate({"model": "."}, ""), on_gpu)
    assert (config.max_batch_size, config.max_tokens_per_step) == (ON_GPU if on_gpu else ON_CPU)
    assert (config.kv_cache_fraction, config.automatic) == ((0.9, BOTH) if on_gpu else (None, CHUNK))
    if not on_gpu:
        assert config.num_blocks * config.block_size == 32 * 1024
    sizes = "256, batching.max_tokens_per_step is 8192, kv_cache.memory_fraction is 0.9"
    said = sizes if on_gpu else "32, batching.max_tokens_per_step is 512, kv_cache.tokens is 32768"
    assert f"batching.max_batch_size is {said}: the deployment does not say" in caplog.text


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_a_deployment_says_holds_on_any_device(on_gpu: bool, caplog: pytest.LogCaptureFixture) -> None:
    batching = {"max_batch_size": 7, "max_tokens_per_step": 99, "prefill_chunk_tokens": None}
    data = {"batching": batching, "kv_cache": {"tokens": 640}}
    with caplog.at_level(logging.INFO):
        config = EngineConfig.of(validate({"model": ".", **data}, ""), on_gpu)
    assert (config.max_batch_size, config.max_tokens_per_step, config.num_blocks) == (7, 99, 40)
    assert (config.kv_cache_fraction, config.automatic) == (None, frozenset())
    assert "does not say" not in caplog.text


def test_a_chunk_is_what_a_cpu_computes_in_half_a_second() -> None:
    assert [affordable_chunk(seconds, 512) for seconds in (1e-5, 0.001, 0.002, 0.01, 0.1)] == [512, 480, 224, 32, 32]
    assert affordable_chunk(0.1, 16) == 16


@pytest.mark.parametrize(
    ("seconds", "chunk", "wait"), [(0.002, 224, "0.4 s"), (0.1, 32, "3.2 s"), (0.000_01, 512, "0.0 s")]
)
def test_a_chunk_is_chosen_by_the_second_of_two_runs(
    seconds: float, chunk: int, wait: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one allocates memory. The log says how long those that decode wait."""
    clock, runs = [0.0], list[int]()

    def compute(count: int) -> int:
        runs.append(count)
        clock[0] += (50.0 if len(runs) == 1 else seconds) * count
        return count

    monkeypatch.setattr("inflight.engine.sizing.time.perf_counter", lambda: clock[0])
    with caplog.at_level(logging.INFO):
        chosen = choose_chunk(EngineConfig(Path("."), max_tokens_per_step=512, automatic=CHUNK), compute)
    assert (chosen.prefill_chunk_tokens, chosen.automatic, len(runs)) == (chunk, frozenset(), 2)
    assert f"wait for up to {wait}" in caplog.text


@pytest.mark.parametrize(("settings", "least", "most"), [({}, 32, 512), ({"max_tokens_per_step": 8}, 8, 8)])
def test_the_engine_chooses_its_chunk_by_its_speed(
    settings: dict[str, int], least: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Any machine is fast enough for some chunk; what the timed steps have written disturbs no answer."""
    request = ask(list(range(1, 40)), 5)
    plain = run(load(checkpoint("llama")), [request])
    with caplog.at_level(logging.INFO):
        engine = load(checkpoint("llama"), automatic=CHUNK, **settings)
    chunk = engine._config.prefill_chunk_tokens
    assert chunk is not None
    assert least <= chunk <= most
    assert f"batching.prefill_chunk_tokens is {chunk}: the deployment does not say" in caplog.text
    assert run(engine, [request])[request.key].tokens == plain[request.key].tokens


def test_a_chunk_is_no_larger_than_the_step_of_the_device() -> None:
    deployment = validate({"model": ".", "batching": {"prefill_chunk_tokens": 1000}}, "")
    assert EngineConfig.of(deployment, on_gpu=True).prefill_chunk_tokens == 1000
    with pytest.raises(DeploymentError, match="prefill_chunk_tokens is 1000; it must not be above .*, 512"):
        EngineConfig.of(deployment)


def test_a_gpu_is_told_from_a_cpu_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []

    class Stop(Exception):
        pass

    def stop(config: EngineConfig, _: object) -> Engine:
        seen.append(config)
        raise Stop

    monkeypatch.setattr(device, "resolve_device", torch.device)
    monkeypatch.setattr(Engine, "load", stop)
    tokenizer = Tokenizer.from_checkpoint(DEMO / "model")
    for name in ("cpu", "cuda:1"):
        deployment = validate({"model": str(DEMO / "model"), "engine": {"device": name}}, "")
        with pytest.raises(Stop):
            factory.make_engine(deployment, tokenizer)
    assert [config.max_batch_size for config in seen] == [32, 256]


@pytest.mark.proof
def test_the_kernels_serve_the_cache_that_is_made_after_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from inflight.engine.cuda.forward import CudaForward
    from inflight.engine.cuda.layers import fuse_layers

    card = _card(monkeypatch, 2 << 20)
    caches: list[KvPool] = []

    def kernels(model: DecoderModel, tensors: KvPool, *sizes: int) -> CudaForward:
        fuse_layers(model)
        caches.append(tensors)
        return CudaForward(model, tensors, *sizes)

    monkeypatch.setattr(model_runner, "cuda_forward", kernels)
    with card:
        served = load(checkpoint("llama"), kv_cache_fraction=0.5, max_batch_size=3, max_tokens_per_step=6)
    request = ask([5, 6, 7, 8, 9, 10, 11, 12], 4)
    assert run(served, [request])[request.key].tokens == greedy("llama", (5, 6, 7, 8, 9, 10, 11, 12), 4)
    assert len(caches) == 1
    assert served._runner._kv_pool is not caches[0]
    assert len(caches[0].layers[0].keys[0]) == 4, "one block: it must be as good as none"
