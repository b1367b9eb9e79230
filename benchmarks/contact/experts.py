"""Experts: their products alone, and an engine that decodes with them, by our kernels and by plain PyTorch."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from benchmarks.contact.engines import best, start, started
from benchmarks.contact.sizes import Batch
from benchmarks.contact.stage import Contact
from benchmarks.contact.timing import graph_seconds_of
from inflight.engine.models.config import ExpertsConfig, ModelConfig
from inflight.engine.models.experts import MoeBlock

_LIMIT = 1e-2
"""Of a layer's experts in bfloat16: some five roundings, one after the other."""
_DEVIATION = 0.02


def products(contact: Contact, _case: str) -> None:
    """Measure the experts of one layer, and hold what they give to float32 by the norm of the error."""
    from inflight.engine.cuda.experts import FusedExperts

    shape, dtype = contact.sizes.expert_shape, torch.float16 if contact.dry else torch.bfloat16
    assert shape.experts is not None
    config = ExpertsConfig(shape.experts.count, shape.experts.per_token, shape.experts.size, "softmax", True)
    block = _block(shape.hidden, config, contact.device)
    fused = FusedExperts(_block(shape.hidden, config, contact.device).to(dtype), None)
    generator = torch.Generator(contact.device).manual_seed(1)
    each = 3 * config.intermediate_size * shape.hidden * dtype.itemsize
    with torch.inference_mode():
        for tokens in contact.sizes.expert_rows:
            x = torch.randn(tokens, shape.hidden, generator=generator, device=contact.device).to(dtype)
            chosen, weights = fused.chosen(x)
            expected = block.mix(x.float(), chosen.long(), weights)
            error = float((fused(x).float() - expected).norm() / expected.norm())
            seconds = graph_seconds_of(contact, lambda x=x: fused(x))  # type: ignore[misc]
            read = each * len(chosen.unique())
            flops = 2 * each // dtype.itemsize * chosen.numel()
            note = f"{1e6 * seconds:.1f} us, {read / seconds / 1e12:.2f} TB/s, {flops / seconds / 1e12:.1f} TFLOP/s"
            contact.recorder.add(f"experts of {tokens}", error, "error by norm", good=error <= _LIMIT, note=note)


def _block(hidden: int, config: ExpertsConfig, device: torch.device) -> MoeBlock:
    """Return the experts of a layer, in float32, always the same."""
    model = ModelConfig("", 1, hidden, (), 1, 1e-6, "silu", False, False, "")
    with torch.device("meta"):
        block = MoeBlock(model, config)
    block.to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in block.parameters():
        parameter.normal_(0, _DEVIATION, generator=generator).copy_(parameter.bfloat16())
    return block


def engine(contact: Contact, _case: str) -> None:
    """Measure decoding and prefill of a model with experts, by our kernels and then by PyTorch alone."""
    for kernels in (True, False) if contact.kernels else (False,):
        _served(replace(contact, kernels=kernels), "experts" if kernels else "experts, PyTorch")
        gc.collect()  # the engine, whose memory the next one needs
        if not contact.dry:
            torch.cuda.empty_cache()


def _served(contact: Contact, label: str) -> None:
    """Measure all batches on an engine; by PyTorch alone few tokens, since each takes a tenth of a second."""
    shape, batches = contact.sizes.expert_shape, contact.sizes.expert_batches
    with started(contact, shape=shape, max_batch_size=max(batch.streams for batch in batches)) as made:
        if contact.kernels:
            start(contact, made)
        assert contact.kernels == (made._runner._kernels is not None)
        for batch in batches:
            few = batch if contact.kernels else replace(batch, output=min(batch.output, 8))
            with contact.recorder.attempt(f"decode {batch.name}, {label}"):
                _rates(contact, made, few, label)


def _rates(contact: Contact, made: object, batch: Batch, label: str) -> None:
    rates = best(made, batch, contact.sizes.rounds)  # type: ignore[arg-type]
    note = f"{1000 * batch.streams / rates.decode:.2f} ms per step"
    contact.recorder.add(f"decode {batch.name}, {label}", round(rates.decode, 1), "tok/s", note=note)
    contact.recorder.add(f"prefill {batch.name}, {label}", round(rates.prefill, 1), "tok/s")
