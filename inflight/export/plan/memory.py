"""What fits into a GPU: weights, activations, the runtime's own memory, and the KV cache in what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.engine.models.config import ModelConfig
from inflight.export.plan.gpus import Gpu
from inflight.export.plan.placement import Parallel, Shape, Stage

FREE_MEMORY_FRACTION = 0.9
"""Of the memory that weights, activations and runtime leave, for the KV cache: the deployment's own default. The rest
is for fragmentation, and for kernels that ask for scratch memory later."""
RUNTIME_BYTES = 1 << 30
"""Assumed: CUDA context and libraries (about 0.5 GiB), cuBLAS and attention workspaces, captured CUDA graphs."""
COMMUNICATION_BYTES = 256 << 20
"""Assumed: buffers of NCCL and of the all-reduce kernels, on each GPU of a group."""
CPU_RUNTIME_BYTES = 512 << 20
"""Assumed: Python, PyTorch, and the server's stages."""


@dataclass(frozen=True)
class Memory:
    """One GPU's memory, in bytes: the GPU of a group that holds the fewest tokens."""

    total: int
    weights: int
    activations: int
    runtime: int
    kv_cache: int
    reserve: int
    """What ``free_gpu_memory_fraction`` leaves alone."""
    free: int
    """Unused: the KV cache's capacity is limited by choice."""
    kv_bytes_per_token: int
    """Of the sequences' tokens in this GPU's cache, without windows."""
    kv_tokens: int
    """Capacity of the KV cache, whole blocks."""


def activation_bytes(config: ModelConfig, tensor: int, tokens: int, samples: int, number_bytes: int) -> int:
    """Return the peak of a step's activations.

    Layers reuse one another's memory, so it is the largest of three moments; the residual stream and its normalized
    copy, ``2 x hidden`` per token, live through all of them:

    - attention: query, key and value, and the output before ``o_proj``,
    - the feed-forward layer: gate and up projection, and their product,
    - the logits of the tokens that sample: in the type of the computation, in float32, and a float32 copy to sort.

    Args:
        config: the model.
        tensor: GPUs that share each layer; all but the residual stream is split. Logits are gathered on each.
        tokens: of the step.
        samples: sequences that sample in it.
        number_bytes: of an activation.
    """
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    residual = 2 * config.hidden_size * tokens
    attention = (2 * query + 2 * key) * tokens / tensor
    mlp = 3 * config.intermediate_size * tokens / tensor
    logits = samples * config.vocab_size * (number_bytes + 8)
    return round(max((residual + max(attention, mlp)) * number_bytes, residual * number_bytes + logits))


class MemoryPlanner:
    """What one GPU of a group can hold."""

    def __init__(self, shape: Shape, gpu: Gpu, parallel: Parallel, block_size: int) -> None:
        self._shape, self._gpu, self._parallel, self._block_size = shape, gpu, parallel, block_size
        self.stages = shape.stages(parallel)

    def fixed(self, stage: Stage, tokens: int, samples: int) -> tuple[int, int, int]:
        """Return the bytes of weights, activations and runtime, for steps of ``tokens``."""
        shape, parallel = self._shape, self._parallel
        activations = activation_bytes(shape.config, parallel.tensor, tokens, samples, shape.precision.base)
        runtime = CPU_RUNTIME_BYTES if self._gpu.is_cpu else RUNTIME_BYTES
        return stage.weight_bytes, activations, runtime + COMMUNICATION_BYTES * (parallel.gpus > 1)

    def pool(self, stage: Stage, tokens: int, samples: int) -> int:
        """Return the bytes that the KV cache may have; 0 where nothing is left."""
        left = self._gpu.memory_bytes - sum(self.fixed(stage, tokens, samples))
        return max(0, int(left * FREE_MEMORY_FRACTION))

    def sequences(self, length: int, tokens: int, samples: int) -> int:
        """Return how many sequences of ``length`` tokens fit, each in whole blocks."""
        return min(
            int(self.pool(stage, tokens, samples) // stage.kv_bytes(self.whole_blocks(length))) for stage in self.stages
        )

    def whole_blocks(self, tokens: int) -> int:
        """Return ``tokens``, rounded up to whole blocks."""
        return -(-tokens // self._block_size) * self._block_size

    def layout(self, tokens: int, samples: int, wanted_tokens: int | None) -> Memory:
        """Return the memory of the GPU that holds the fewest tokens.

        Args:
            tokens: of a step.
            samples: sequences of a step.
            wanted_tokens: capacity to give the KV cache; None: all that fits.
        """
        return min(
            (self._layout(stage, tokens, samples, wanted_tokens) for stage in self.stages),
            key=lambda memory: (memory.kv_tokens, -memory.weights),
        )

    def _layout(self, stage: Stage, tokens: int, samples: int, wanted_tokens: int | None) -> Memory:
        weights, activations, runtime = self.fixed(stage, tokens, samples)
        pool = self.pool(stage, tokens, samples)
        per_token = stage.kv_layer_bytes * len(stage.windows)
        fitting = int(pool // (per_token * self._block_size)) * self._block_size
        kv_tokens = fitting if wanted_tokens is None else min(fitting, self.whole_blocks(wanted_tokens))
        kv_cache = pool if wanted_tokens is None else math.ceil(kv_tokens * per_token)
        total = self._gpu.memory_bytes
        reserve = total - weights - activations - runtime - pool
        return Memory(
            total=total,
            weights=weights,
            activations=activations,
            runtime=runtime,
            kv_cache=kv_cache,
            reserve=reserve,
            free=pool - kv_cache,
            kv_bytes_per_token=round(per_token),
            kv_tokens=kv_tokens,
        )


def group_weight_bytes(stages: Sequence[Stage], parallel: Parallel) -> int:
    """Return the bytes of the weights on all GPUs of a group."""
    return parallel.tensor * sum(stage.weight_bytes for stage in stages)
