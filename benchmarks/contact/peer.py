"""The same work by transformers' continuous batching, on weights made where they are needed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contact.stage import Contact
from benchmarks.drive import prompts
from benchmarks.random_weights import write_config
from benchmarks.transformers_peers import ContinuousPeer


def transformers(contact: Contact, _case: str) -> None:
    """Measure one batch. Without flash-attn it attends with dense masks, and is no measure of what it can do."""
    sizes = contact.sizes
    batch = sizes.sampled
    model = _model(contact)
    peer = ContinuousPeer(model, batch.streams, batch.prompt + batch.output, sizes.tokens_per_step)
    generator = np.random.default_rng(0)
    try:
        for counted in (False, True):
            rates = peer.run(prompts(generator, batch.streams, batch.prompt), batch.output)
            if counted:
                contact.recorder.add(f"decode {batch.name}, transformers", round(rates.decode, 1), "tok/s")
                contact.recorder.add(f"prefill {batch.name}, transformers", round(rates.prefill, 1), "tok/s")
    finally:
        peer.close()


def _model(contact: Contact) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(write_config(contact.sizes.shape, Path(folder), fp8=False))
    dtype = torch.float32 if contact.dry else torch.bfloat16
    with torch.device(contact.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()
