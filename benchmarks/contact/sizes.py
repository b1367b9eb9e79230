"""How large things are in the runs on a GPU, and in a dry run on a CPU, where figures say nothing."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.checkpoints import VOCAB, Experts, Shape

LARGE = Shape("8B", 8.03e9, 128_256, 4096, 14_336, 32, 32, 8)
"""Llama 3.1 8B."""
TINY = Shape("tiny", 3e5, VOCAB, 32, 64, 1, 2, 1)

EXPERTS = Shape("30B-A3B, 12 layers", 7.9e9, 151_936, 2048, 6144, 12, 16, 4, Experts(128, 8, 768))
"""A quarter of the layers of Qwen3-30B-A3B, with half of its heads of queries."""
FEW_EXPERTS = Shape("experts", 3e5, VOCAB, 32, 64, 1, 2, 1, Experts(4, 2, 24))


@dataclass(frozen=True)
class Batch:
    """Sequences that decode together."""

    streams: int
    prompt: int
    """Tokens of each prompt."""
    output: int
    """Tokens of each answer."""

    @property
    def context(self) -> int:
        """Tokens of a sequence, halfway through its answer."""
        return self.prompt + self.output // 2

    @property
    def name(self) -> str:
        """The name in tables."""
        return f"{self.streams} x {self.prompt}"


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    shape: Shape
    batches: tuple[Batch, ...]
    fp8_batches: tuple[Batch, ...]
    mode_batches: tuple[Batch, ...]
    """What is run with graphs and with steps launched ahead, each switched off."""
    expert_shape: Shape
    expert_batches: tuple[Batch, ...]
    expert_rows: tuple[int, ...]
    """Tokens of a step, in the products of experts whose time is taken."""
    sampled: Batch
    prefill: int
    """Tokens of the one long prompt."""
    tokens_per_step: int
    copy_bytes: int
    rows: tuple[int, ...]
    """The rows of the left matrix, in the products whose time is taken."""
    arrivals: int
    """Requests that arrive one after the other."""
    rounds: int


FULL = Sizes(
    shape=LARGE,
    batches=(
        Batch(1, 512, 128),
        Batch(8, 512, 128),
        Batch(64, 512, 128),
        Batch(256, 512, 64),
        Batch(1, 8192, 64),
        Batch(8, 8192, 64),
        Batch(64, 8192, 48),
        Batch(1, 32_000, 48),
        Batch(8, 32_000, 48),
    ),
    fp8_batches=(Batch(1, 512, 128), Batch(64, 512, 128), Batch(1, 8192, 64)),
    mode_batches=(Batch(1, 512, 128), Batch(64, 512, 64)),
    expert_shape=EXPERTS,
    expert_batches=(Batch(1, 512, 64), Batch(8, 512, 64), Batch(64, 512, 32)),
    expert_rows=(1, 8, 64, 256, 1024, 8192),
    sampled=Batch(64, 512, 64),
    prefill=8192,
    tokens_per_step=8192,
    copy_bytes=4 << 30,
    rows=(1, 8, 16, 17, 64, 256, 1024, 8192),
    arrivals=96,
    rounds=3,
)
DRY = Sizes(
    shape=TINY,
    batches=(Batch(1, 4, 3), Batch(2, 4, 3)),
    fp8_batches=(Batch(1, 4, 3),),
    mode_batches=(Batch(2, 4, 3),),
    expert_shape=FEW_EXPERTS,
    expert_batches=(Batch(2, 4, 3),),
    expert_rows=(1, 3),
    sampled=Batch(2, 4, 3),
    prefill=8,
    tokens_per_step=8,
    copy_bytes=1 << 20,
    rows=(1, 17),
    arrivals=3,
    rounds=1,
)
