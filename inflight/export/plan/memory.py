"""What fits into a GPU: weights, activations, the runtime's own memory, and the KV cache in what is left."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inflight.engine.models.config import LayerConfig, ModelConfig
from inflight.export.plan.gpus import Gpu
from inflight.export.plan.shape import Parallel, Shape
from inflight.export.plan.stage import Stage

LARGEST_BATCH = 1024
FREE_MEMORY_FRACTION = 0.9
"""The share for the KV cache of the memory that weights, activations and runtime leave: the deployment's own default.
The rest is for fragmentation, and for kernels that ask for scratch memory later."""
RUNTIME_BYTES = 1 << 30
"""Assumed: CUDA context and libraries (about 0.5 GiB), cuBLAS and attention workspaces, captured CUDA graphs."""
COMMUNICATION_BYTES = 256 << 20
"""Assumed: buffers of NCCL and of the all-reduce kernels, on each GPU of a group."""
_STATES = 2
"""Recurrent states for each sequence that runs: its own, and the snapshot of a cached prefix (the default)."""
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
    """With the recurrent states of sequences, and of as many cached prefixes."""
    reserve: int
    """What ``free_gpu_memory_fraction`` leaves alone."""
    free: int
    """Unused: the KV cache's capacity is limited by choice."""
    kv_bytes_per_token: int
    """The bytes that a token of a sequence takes in this GPU's cache, without windows."""
    kv_tokens: int
    """Capacity of the KV cache, whole blocks."""


def activation_bytes(config: ModelConfig, tensor: int, tokens: int, samples: int, number_bytes: int) -> int:
    """Return the peak of a step's activations.

    Layers reuse one another's memory, so it is the largest of three moments; the residual stream and its normalized
    copy, ``2 x hidden`` per token, live through all of them:

    - attention: query, with its gate, key and value, and the output before ``o_proj``; of a recurrent layer query, key,
      value and gate, and the output,
    - the feed-forward layer: gate and up projection, and their product,
    - the logits of the tokens that sample: in the type of the computation, in float32, and a float32 copy to sort.

    A group of ``tensor`` GPUs splits all but the residual stream; logits are gathered on each. Of a step's ``tokens``,
    ``samples`` are sampled for.
    """
    residual = 2 * config.hidden_size * tokens
    heads = max(_mixing_values(layer) for layer in config.layers)
    attention = heads * tokens / tensor
    mlp = max(_inner_values(layer, config.hidden_size) for layer in config.layers) * tokens / tensor
    if config.outlined is not None:  # as much as a gate, what it multiplies, and their product
        mlp = max(3 * one.outputs for one in config.outlined.matrices) * tokens
    logits = samples * config.vocab_size * (number_bytes + 8)
    return round(max((residual + max(attention, mlp)) * number_bytes, residual * number_bytes + logits))


def _mixing_values(layer: LayerConfig) -> int:
    """Return how many values a token has within attention, or within what is in its place."""
    if (one := layer.attention) is not None:
        return (one.num_heads * (2 + one.output_gate) + 2 * one.num_kv_heads) * one.head_dim
    delta_net = layer.recurrent
    return delta_net.channels + 2 * delta_net.value_heads * delta_net.value_dim if delta_net is not None else 0


def _inner_values(layer: LayerConfig, hidden: int) -> int:
    """Return how many values a token has within a feed-forward; of experts, what each gives is kept until the sum."""
    if layer.experts is None:
        return 3 * layer.intermediate_size
    experts = layer.experts
    return experts.per_token * (3 * experts.intermediate_size + hidden) + 3 * experts.shared_size


class MemoryPlanner:
    """What one GPU of a group can hold."""

    def __init__(self, shape: Shape, gpu: Gpu, parallel: Parallel, block_size: int) -> None:
        self._shape, self._gpu, self._parallel, self._block_size = shape, gpu, parallel, block_size
        self.stages = shape.stages(parallel)

    def sequences(self, length: int, tokens: int) -> int:
        """Return how many sequences of ``length`` tokens fit beside steps of ``tokens``, each in whole blocks.

        Each has its recurrent state besides, and so has a cached prefix for each.
        """
        blocks = self._whole_blocks(length)
        return min(
            int(self._pool(stage, tokens)[0] // (stage.kv_bytes(blocks) + _STATES * stage.state_bytes))
            for stage in self.stages
        )

    def layout(self, tokens: int, wanted_tokens: int | None, sequences: int) -> Memory:
        """Return the memory of the GPU that holds the fewest tokens, with steps of ``tokens``.

        The KV cache is given ``wanted_tokens``; None: all that fit. ``sequences`` run at once.
        """
        layouts = []
        for stage in self.stages:
            pool, activations, runtime = self._pool(stage, tokens)
            per_token = stage.kv_token_bytes
            states = sequences * _STATES * stage.state_bytes
            kv_tokens = self._whole_blocks(sequences * self._shape.config.max_position_embeddings)
            if per_token:  # else the stage has recurrent layers alone
                kv_tokens = int((pool - states) // (per_token * self._block_size)) * self._block_size
            kv_cache = pool
            if wanted_tokens is not None:
                kv_tokens = min(kv_tokens, self._whole_blocks(wanted_tokens))
                kv_cache = math.ceil(kv_tokens * per_token + states)
            memory = Memory(
                total=self._gpu.memory_bytes,
                weights=stage.weight_bytes,
                activations=activations,
                runtime=runtime,
                kv_cache=kv_cache,
                reserve=self._gpu.memory_bytes - stage.weight_bytes - activations - runtime - pool,
                free=pool - kv_cache,
                kv_bytes_per_token=round(per_token),
                kv_tokens=kv_tokens,
            )
            layouts.append(memory)
        return min(layouts, key=lambda memory: (memory.kv_tokens, -memory.weights))

    def _pool(self, stage: Stage, tokens: int) -> tuple[int, int, int]:
        """Return the bytes that the KV cache may have, 0 where nothing is left; of activations; and of the runtime.

        A step samples for each of its ``tokens``, up to the largest batch.
        """
        config, number_bytes = self._shape.config, self._shape.precision.base
        samples = min(LARGEST_BATCH, tokens)
        activations = activation_bytes(config, self._parallel.tensor, tokens, samples, number_bytes)
        runtime = CPU_RUNTIME_BYTES if self._gpu.is_cpu else RUNTIME_BYTES
        runtime += COMMUNICATION_BYTES * (self._parallel.gpus > 1)
        left = self._gpu.memory_bytes - stage.weight_bytes - activations - runtime
        return max(0, int(left * FREE_MEMORY_FRACTION)), activations, runtime

    def _whole_blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size) * self._block_size
