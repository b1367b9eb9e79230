"""The sizes of the engines where a deployment says nothing: of the portable one, by its device."""

from __future__ import annotations

from typing import NamedTuple


class StepSize(NamedTuple):
    """How much is computed in one step, at the most."""

    sequences: int
    tokens: int


ON_CPU, ON_GPU = StepSize(32, 512), StepSize(256, 8192)
"""A CPU's step takes longer with each token; a GPU's takes hardly longer up to some hundred."""
TENSORRT_LLM_SEQUENCES = 64
"""That TensorRT-LLM's PyTorch flow runs at once. Its own 2,048 cost the buffers of its sampler that many rows."""
TOKENS_PER_SEQUENCE = 1024
"""That the KV cache holds on a CPU, for each sequence of a full batch."""
GPU_MEMORY_FRACTION = 0.9
"""``kv_cache.memory_fraction`` on a GPU: its memory is the engine's to use. A CPU's belongs to the whole machine."""
