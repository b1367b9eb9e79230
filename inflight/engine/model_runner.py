"""The model runner: owns weights and KV tensors, and turns a step's chunks into logits."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.engine.attention.paged import PagedAttention, Span
from inflight.engine.checkpoint import load_config, load_model, resolve_dtype
from inflight.engine.config import EngineConfig
from inflight.engine.kv_cache import BlockCopy
from inflight.engine.scheduler import Chunk
from inflight.errors import DeploymentError

log = logging.getLogger(__name__)


class ModelRunner:
    """Runs the model on one device."""

    def __init__(self, config: EngineConfig) -> None:
        """
        Raises:
            DeploymentError: the checkpoint or the device cannot be used.
        """
        self.device = resolve_device(config.device)
        # One core is left to the server and the other stages: a thread that waits for a busy core stalls every step.
        torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) - 1))
        model = load_config(config.model)
        dtype = resolve_dtype(config.dtype, model)
        capacity = config.num_blocks * config.block_size
        self.max_length = min(config.max_sequence_length or model.max_position_embeddings, capacity)
        self.vocab_size = model.vocab_size
        self._block_size = config.block_size
        loaded = load_model(config.model, model, dtype, self.device, self.max_length, config.kv_cache_dtype)
        self._model = loaded.model
        self._kv = loaded.make_kv_tensors(config.num_blocks, config.block_size)
        log.info(
            "%s on %s in %s: %d layers, quantization %s, weights of %.1f MiB, sequences up to %d tokens, "
            "KV cache of %d tokens in %s (%.1f MiB)",
            model.architecture, self.device, dtype, model.num_layers, loaded.scheme, loaded.nbytes / 2**20,
            self.max_length, capacity, self._kv.keys.dtype, self._kv.nbytes / 2**20,
        )  # fmt: skip

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], copies: Sequence[BlockCopy]) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute a step.

        Args:
            chunks: what to compute; the sequences' tables have room for it.
            copies: blocks to copy before.

        Returns:
            Float32 logits ``[n, vocab]`` of the ``n`` chunks that sample, in their order; and by index of chunk the
            logits ``[size, vocab]`` of all its tokens, where its request wants context logits.
        """
        self._kv.copy(copies)
        spans = self._spans(chunks)
        token_ids = [
            token for chunk in chunks for token in chunk.sequence.tokens[chunk.start : chunk.start + chunk.size]
        ]
        positions = [position for span in spans for position in range(span.start, span.start + span.count)]
        hidden = self._model(
            torch.tensor(token_ids, device=self.device),
            torch.tensor(positions, device=self.device),
            PagedAttention(self._kv, spans, self._block_size),
        )
        last = [span.first + span.count - 1 for chunk, span in zip(chunks, spans, strict=True) if chunk.samples]
        context = {
            index: self._model.logits(hidden[span.first : span.first + span.count])
            for index, (chunk, span) in enumerate(zip(chunks, spans, strict=True))
            if chunk.sequence.request.sampling.context_logits and not chunk.sequence.generated
        }
        return self._model.logits(hidden[last]), context

    def _spans(self, chunks: Sequence[Chunk]) -> list[Span]:
        spans, first = [], 0
        for chunk in chunks:
            table = chunk.sequence.table
            assert table is not None
            blocks = table.blocks[: -(-(chunk.start + chunk.size) // self._block_size)]
            spans.append(Span(first, chunk.start, chunk.size, blocks))
            first += chunk.size
        return spans


def resolve_device(name: str) -> torch.device:
    """Return the device called ``name``; auto: a GPU if there is one.

    Raises:
        DeploymentError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeploymentError(f"engine.device is {name!r}; it must be cpu, cuda, cuda:N or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeploymentError(f"engine.device is {name!r}, and PyTorch finds no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise DeploymentError(f"engine.device is {name!r}; it must be cpu, cuda, cuda:N or auto")
    return device
