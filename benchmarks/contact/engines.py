"""The engine on a model whose weights are made where they are needed: its start, its memory, decoding and prefill."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.checkpoints import Shape
from benchmarks.contact.sizes import Batch
from benchmarks.contact.stage import Contact
from benchmarks.drive import prompts
from benchmarks.random_weights import RandomShards, write_config
from benchmarks.roofline import flops_per_token
from benchmarks.transformers_peers import EnginePeer, Rates
from inflight.engine import model_runner
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.model_runner import ModelRunner

BLOCK_SIZE = 16
_MEMORY = 0.85
"""Of what the weights leave, for keys and values; the rest is for a step."""
_DRY_BLOCKS = 12
_MANY_TOKENS = 1 << 16
"""Prompts of more tokens in all are computed once, not several times."""


@contextmanager
def started(
    contact: Contact, fp8: bool = False, shape: Shape | None = None, **settings: Any
) -> Iterator[Engine]:  # fmt: skip
    """Yield a warm engine of the contact's shape, or another; its memory is free once the caller drops it too.

    Args:
        contact: says where, how large, and whether with our kernels.
        fp8: whether the linears of the layers are in FP8.
        shape: in place of the contact's.
        settings: of ``EngineConfig``, in place of what suits a measurement.
    """
    sizes, device = contact.sizes, contact.device
    longest = max(batch.prompt + batch.output for batch in sizes.batches) + BLOCK_SIZE
    wanted: dict[str, Any] = {
        "device": str(device),
        "dtype": "float32" if contact.dry else "bfloat16",
        "block_size": BLOCK_SIZE,
        "prefix_reuse": False,
        "max_batch_size": max(batch.streams for batch in sizes.batches),
        "max_tokens_per_step": sizes.tokens_per_step,
        "max_sequence_length": longest,
        **({"num_blocks": _DRY_BLOCKS} if contact.dry else {"kv_cache_fraction": _MEMORY}),
    }
    with tempfile.TemporaryDirectory() as folder:
        directory = write_config(shape or sizes.shape, Path(folder), fp8)
        shards = RandomShards(shape or sizes.shape, fp8, device)
        yield from _served(contact, EngineConfig(directory, **(wanted | settings)), shards)


def _served(contact: Contact, config: EngineConfig, shards: RandomShards) -> Iterator[Engine]:
    with _kernels(contact):
        runner = ModelRunner(config, lambda _: shards)
        engine = Engine(runner, tokenizer=None)
        engine.warm_up()
    try:
        yield engine
    finally:
        del engine, runner
        gc.collect()
        if not contact.dry:
            torch.cuda.empty_cache()


@contextmanager
def _kernels(contact: Contact) -> Iterator[None]:
    """Have an engine that is made in here use our kernels or not, as the contact says; interpreted in a dry run."""
    if not contact.kernels:
        with mock.patch.object(model_runner, "cuda_forward", return_value=None):
            yield
    elif contact.dry:
        from benchmarks.contact.interpreted import interpreted

        with interpreted():
            yield
    else:
        yield


def bfloat16(contact: Contact, _case: str) -> None:
    """Measure the start, the memory, and all batches."""
    with started(contact) as engine:
        start(contact, engine)
        batches(contact, engine, contact.sizes.batches, "bf16")
        memory(contact, "memory, reserved afterwards")


def modes(contact: Contact, _case: str) -> None:
    """Measure some batches as they are, then without steps ahead, then without graphs too."""
    with started(contact, max_batch_size=_most(contact)) as engine:
        batches(contact, engine, contact.sizes.mode_batches, "as it is")
        engine._overlap = None
        batches(contact, engine, contact.sizes.mode_batches, "no step ahead")
        if engine._runner._kernels is not None:
            engine._runner._kernels.graphs = None
        batches(contact, engine, contact.sizes.mode_batches, "no graph either")


def batch_invariant(contact: Contact, _case: str) -> None:
    """Measure the same batches with ``engine.batch_invariant``."""
    if contact.refuses_batch_invariance():
        return
    with started(contact, max_batch_size=_most(contact), batch_invariant=True) as engine:
        batches(contact, engine, contact.sizes.mode_batches, "batch-invariant")


def _most(contact: Contact) -> int:
    return max(batch.streams for batch in contact.sizes.mode_batches)


def fp8(contact: Contact, _case: str) -> None:
    """Measure a few batches of an FP8 checkpoint."""
    with started(contact, fp8=True) as engine:
        start(contact, engine)
        batches(contact, engine, contact.sizes.fp8_batches, "FP8")


def start(contact: Contact, engine: Engine) -> None:
    """Write the phases of the start, and what is in memory."""
    for phase, seconds in engine.stats.start_phases.items():
        contact.recorder.add(f"start, {phase}", round(seconds, 2), "s")
    tokens = engine.stats.state().kv_blocks_max * engine.stats.state().tokens_per_block
    contact.recorder.add("KV cache", tokens, "tokens")
    memory(contact, "memory, reserved when warm")


def memory(contact: Contact, name: str) -> None:
    """Write what PyTorch has taken of the device's memory, and what is free."""
    if contact.dry:
        return
    free = torch.cuda.mem_get_info()[0] / 2**30
    reserved = torch.cuda.memory_reserved() / 2**30
    contact.recorder.add(name, round(reserved, 2), "GiB", note=f"{free:.1f} GiB are free")


def batches(contact: Contact, engine: Engine, wanted: Sequence[Batch], label: str) -> None:
    """Measure decoding and prefill of batches; what the cache has no room for is left out, and it is said."""
    room = engine.stats.state().kv_blocks_max
    for batch in wanted:
        name = f"{batch.name}, {label}"
        if batch.streams * (-(-(batch.prompt + batch.output) // BLOCK_SIZE) + 1) > room:
            contact.recorder.add(f"decode {name}", "no room", note=f"the cache has {room} blocks")
            continue
        with contact.recorder.attempt(f"decode {name}"):
            _batch(contact, engine, batch, name)


def launched_ahead(engine: Engine) -> int:
    """Return how many steps were launched before the one before was read, so far."""
    return 0 if engine._overlap is None else engine._overlap.launches


def _batch(contact: Contact, engine: Engine, batch: Batch, name: str) -> None:
    rounds = contact.sizes.rounds if batch.streams * batch.prompt <= _MANY_TOKENS else 1
    ahead, steps = launched_ahead(engine), engine.stats.steps
    rates = best(engine, batch, rounds)
    share = (launched_ahead(engine) - ahead) / max(1, engine.stats.steps - steps)
    milliseconds = 1000 * batch.streams / rates.decode
    note = f"{milliseconds:.2f} ms per step, {share:.0%} of steps launched ahead"
    contact.recorder.add(f"decode {name}", round(rates.decode, 1), "tok/s", note=note)
    flops = flops_per_token(contact.sizes.shape, 1 / batch.prompt) + _attention_flops(contact, batch)
    told = f"{rates.prefill * flops / 1e12:.1f} TFLOP/s"
    contact.recorder.add(f"prefill {name}", round(rates.prefill, 1), "tok/s", note=told)


def _attention_flops(contact: Contact, batch: Batch) -> float:
    """Return the operations of attention for each token of a prompt, half of the square being masked."""
    return 2.0 * contact.sizes.shape.layers * contact.sizes.shape.hidden * batch.prompt


def best(engine: Engine, batch: Batch, rounds: int) -> Rates:
    """Return the best rates of some rounds."""
    peer, generator = EnginePeer(engine), np.random.default_rng(0)
    found = [peer.run(prompts(generator, batch.streams, batch.prompt), batch.output) for _ in range(rounds)]
    return Rates(max(one.prefill for one in found), max(one.decode for one in found))
