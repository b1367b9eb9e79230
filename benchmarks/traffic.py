"""What the kernels of one layer read and write at the least, from a model's shape: a bound on their time on a GPU.

A kernel that lies between matrix products takes its bytes by the memory's bandwidth, and a launch; how far what is
measured is above that says what there is to gain.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.engine.models.config import ModelConfig


@dataclass(frozen=True)
class KernelTraffic:
    """A kernel of one layer."""

    name: str
    launches: int
    nbytes: int
    """Read and written by all its launches together; reading twice what was just written counts twice."""


def layer_traffic(config: ModelConfig, tokens: int, context: int, fp8: bool = False) -> list[KernelTraffic]:
    """Return the traffic of a layer in a step, in the order of the kernels' first launches.

    Args:
        config: of a model like Llama, which computes in 16 bits and has a cache of 16 bits.
        tokens: of the step.
        context: tokens that are attended over, of all sequences together; their keys and values are read once.
        fp8: whether the products are FP8.
    """
    hidden, inner, size = config.hidden_size, config.intermediate_size, 2
    wide, kv = config.num_heads * config.head_dim, 2 * config.num_kv_heads * config.head_dim
    taken = 1 if fp8 else size
    """Bytes of a product's weight, and of its input."""
    norm = tokens * hidden * (3 * size + taken) + hidden * size
    products = ((hidden, wide + kv), (wide, hidden), (hidden, 2 * inner), (inner, hidden))
    moved = sum(taken * (tokens + rows) * inputs + size * tokens * rows for inputs, rows in products)
    store = 2 * tokens * (wide + kv) * size + tokens * config.head_dim * size
    kernels = [
        KernelTraffic("add_rms_norm", 2, 2 * norm),
        KernelTraffic("product", 4, moved),
        KernelTraffic("store", 1, store),
        KernelTraffic("attend", 1, (context * kv + 2 * tokens * wide) * size),
        KernelTraffic("gate", 1, tokens * inner * (2 * size + taken)),
    ]
    if fp8:  # what attention returns is quantized by itself
        kernels.append(KernelTraffic("quantize", 1, tokens * wide * (size + 1)))
    return kernels
