"""What one GPU of a group holds, reads and computes: its part of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from inflight.engine.native.bindings import Packed
from inflight.export.plan.gpus import Arithmetic


@dataclass(frozen=True)
class AttentionWork:
    """What attention of one layer takes, on one GPU."""

    window: int | None
    """How many tokens it reaches back; None: all."""
    flops: float
    """Per token and token attended: scores and weighted sum."""
    kv_bytes: float
    """Of a key and a value of one token; multi-query, grouped and multi-head attention differ in it alone."""


@dataclass(frozen=True)
class LinearWork:
    """What linear layers take that are computed alike, on one GPU."""

    arithmetic: Arithmetic
    packed: Packed | None
    """What the native step packs them as; None: it does not compute the model."""
    share: float
    """Of the tokens, how many each of them multiplies: an expert those that are routed to it."""
    bytes: float
    flops: float
    """The work per token of the step: a multiplication and an addition per weight, times the share."""

    def read_share(self, tokens: float) -> float:
        """Return how much of it a step of ``tokens`` reads, on average.

        An expert is read if any of the tokens is routed to it; all experts are taken to be equally likely.
        """
        return 1 - (1 - self.share) ** tokens


@dataclass(frozen=True)
class Stage:
    """One GPU's part of the model; sizes in bytes, work in floating-point operations."""

    layers: tuple[AttentionWork, ...]
    """Of those that have attention."""
    state_bytes: float
    """The bytes of a sequence's recurrent state."""
    state_flops: float
    """The work of recurrent layers per token, without their linear layers."""
    weight_bytes: int
    """The bytes of the weights that stay in the GPU's memory."""
    linears: tuple[LinearWork, ...]
    """The layers' linears, without lm_head; norms count as weights without work."""
    head_bytes: float
    """The bytes of lm_head, which every step reads that samples."""
    head_arithmetic: Arithmetic
    head_packed: Packed | None
    head_flops: float
    """The work of lm_head per sampled token."""
    hidden_bytes: int
    """One token's hidden state, which GPUs exchange."""
    kv_cache: str
    """Type of the KV cache's numbers."""
    free_windows: bool

    @cached_property
    def _kinds(self) -> Mapping[AttentionWork, int]:
        """A plan asks thousands of times for the sum over the layers, and there are few kinds of them."""
        return Counter(self.layers)

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of a token in the cache, without windows."""
        return sum(layers * work.kv_bytes for work, layers in self._kinds.items())

    def read_bytes(self, tokens: float) -> float:
        """Return the bytes of the layers' weights that a step of ``tokens`` reads, on average.

        Of the embedding a step reads a few rows only.
        """
        return sum(one.bytes * one.read_share(tokens) for one in self.linears)

    def attention_flops(self, context: float) -> float:
        """Return the work of attention, or of what is in its place, of one token at ``context``, in all layers."""
        attention = sum(layers * work.flops * _reach(work, context) for work, layers in self._kinds.items())
        return attention + self.state_flops

    def attended_bytes(self, context: float) -> float:
        """Return the bytes that a decoded token at ``context`` reads of its sequence, and of its state writes too."""
        return self._kv_within_reach(context) + 2 * self.state_bytes

    def kv_bytes(self, length: float) -> float:
        """Return the bytes of keys and values that a sequence of ``length`` tokens keeps in the cache."""
        return self._kv_within_reach(length) if self.free_windows else length * self.kv_token_bytes

    def _kv_within_reach(self, context: float) -> float:
        return sum(layers * work.kv_bytes * _reach(work, context) for work, layers in self._kinds.items())


def _reach(work: AttentionWork, context: float) -> float:
    return min(context, work.window or context)
