"""BatchingSettings: which requests are computed when. docs/scheduling.md describes their effects."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, ValidationInfo, field_validator, model_validator

from inflight.settings.section import PORTABLE_ONLY, WITH_A_MODEL, ReadBy, Section


class StepSize(NamedTuple):
    """The most that one step computes."""

    sequences: int
    tokens: int


ON_CPU, ON_GPU = StepSize(32, 512), StepSize(256, 8192)
"""The portable engine's default steps. A CPU's step takes longer with each token; a GPU's takes hardly longer up to
some hundred."""
_CHUNK_S = 0.5
"""The prefill of a step in which others decode takes about so long at the most, where no setting says its size."""
SMALLEST_CHUNK = 32
"""Fewer tokens take hardly less time, as weights are read all the same."""
TENSORRT_LLM_SEQUENCES = 64
"""The default number of sequences that TensorRT-LLM's PyTorch flow runs at once. Its own default is 2,048, and the
buffers of its sampler have a row for each."""


def affordable_chunk(seconds: float, most: int, smallest: int = SMALLEST_CHUNK) -> int:
    """Return the prefill tokens of a step beside decodes, ``most`` at most, where each takes so many seconds."""
    return min(most, max(smallest, int(_CHUNK_S / seconds) // smallest * smallest))


class BatchingSettings(Section):
    """The scheduler."""

    mode: Annotated[Literal["inflight", "dynamic", "static"], PORTABLE_ONLY] = Field(
        "inflight",
        description="inflight: requests join and leave at any step; static: those that wait form a batch that nobody "
        "joins until it has ended; dynamic: static, but a batch that is not full waits for max_queue_delay_ms",
    )
    max_queue_delay_ms: Annotated[float, PORTABLE_ONLY] = Field(
        10,
        ge=0,
        le=60_000,
        allow_inf_nan=False,
        description="`mode: dynamic`: how long the oldest request waits, at most, for a batch to fill up",
    )
    max_batch_size: int = Field(
        ON_CPU.sequences,
        ge=1,
        le=4096,
        description=f"sequences that run at once; unset, {ON_GPU.sequences} on a GPU, or fewer if its memory is small; "
        f"unset on trtllm {TENSORRT_LLM_SEQUENCES}, on tensorrtllm the compiled engine's",
    )
    max_tokens_per_step: Annotated[int, WITH_A_MODEL] = Field(
        ON_CPU.tokens,
        ge=1,
        description=f"tokens of one step, prefill and decode; unset, {ON_GPU.tokens:,} on a GPU, or fewer if its "
        "memory is small; unset on trtllm TensorRT-LLM's own, on tensorrtllm the compiled engine's",
    )
    prefill_chunk_tokens: Annotated[int | None, PORTABLE_ONLY] = Field(
        None,
        ge=1,
        description="prefill tokens of a step in which others decode, so that a long prompt holds them up no longer; "
        "unset, on a CPU as many as it computes in half a second, at least 32; null, and unset on a GPU: "
        "max_tokens_per_step",
    )
    policy: Annotated[Literal["guaranteed_no_evict", "max_utilization"], WITH_A_MODEL] = Field(
        "guaranteed_no_evict", description="reserve a request's blocks at admission, or preempt when they run out"
    )
    fairness: Annotated[Literal["none", "client"], ReadBy(("pytorch", "trtllm"))] = Field(
        "none", description="client: who waits is served by turns, so that each `client_id` gets as many tokens"
    )
    priority_aging_s: Annotated[float | None, ReadBy(("pytorch", "trtllm"))] = Field(
        60,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="waiting so long counts as much as one level of `priority`; null: priorities are strict",
    )
    max_queue_size: int = Field(256, ge=1, description="requests that may wait; one more is refused")

    @field_validator("max_queue_delay_ms")
    @classmethod
    def _only_dynamic_waits(cls, value: float, info: ValidationInfo) -> float:
        if info.data.get("mode", "dynamic") != "dynamic":
            raise ValueError("it needs `mode: dynamic`; no other mode waits")
        return value

    @model_validator(mode="after")
    def _chunk_within_the_step(self) -> BatchingSettings:
        size, chunk = self.size(on_gpu=True), self.prefill_chunk_tokens
        if chunk is not None and chunk > size.tokens:
            raise ValueError(
                f"`prefill_chunk_tokens` is {chunk}; it must not be above max_tokens_per_step, {size.tokens}"
            )
        return self

    def size(self, on_gpu: bool) -> StepSize:
        """Return the portable engine's largest step: as set, else as suits the device."""
        own, given = (ON_GPU if on_gpu else ON_CPU), self.model_fields_set
        return StepSize(
            self.max_batch_size if "max_batch_size" in given else own.sequences,
            self.max_tokens_per_step if "max_tokens_per_step" in given else own.tokens,
        )

    @property
    def priority_aging_ns(self) -> int | None:
        """``priority_aging_s`` in nanoseconds."""
        return None if self.priority_aging_s is None else round(1e9 * self.priority_aging_s)
