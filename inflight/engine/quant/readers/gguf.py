"""Reads how the linears of a GGUF file are held: each in blocks of a type of its own."""

from __future__ import annotations

from pathlib import Path

from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.gguf.checkpoint import open_gguf
from inflight.gguf.types import BLOCKS


def read(file: Path) -> Quantization | None:
    """Read a file; None: none of its linears is quantized. Raises DeploymentError: it cannot be read."""
    blocks = open_gguf(file).blocks
    layers = {name: LayerQuantization(kind, BLOCKS[kind].block) for name, kind in blocks.items()}
    return Quantization(None, (), layers, fp8_kv_cache=False) if layers else None
