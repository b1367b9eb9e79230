"""KvCacheSettings: the KV cache's size and type, its eviction and its offload pool. See docs/kv-cache.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from inflight.settings.section import PORTABLE_ONLY, VALUE_OF_ENGINES_ALONE, WITH_A_MODEL, ReadBy, Section

TOKENS_PER_SEQUENCE = 1024
"""The KV cache's default size on a CPU, in tokens for each sequence of a full batch."""
GPU_MEMORY_FRACTION = 0.9
"""The default ``memory_fraction`` on a GPU. On a CPU there is none, as the whole machine needs the memory."""
_CAPACITIES = ("tokens", "bytes", "memory_fraction")
_PORTABLE_TYPES = ReadBy(("pytorch",), VALUE_OF_ENGINES_ALONE, ("int8", "bfloat16", "float32"))


class OffloadSettings(Section):
    """The second tier, to which evicted blocks are offloaded."""

    to: Literal["none", "host", "file"] = Field(
        "none", description="host: the host's memory, for a GPU's cache; file: a file that is mapped into memory"
    )
    bytes: int = Field(1 << 30, ge=1, description="its size; reserved at the start")
    directory: Path | None = Field(
        None, description="`to: file`: where the file is, relative to the deployment; null: the system's temporary one"
    )
    min_tokens: int | None = Field(
        None,
        ge=1,
        description="restore prefixes of at least so many tokens; null: where it takes less time than computing them, "
        "as both have been measured",
    )

    @model_validator(mode="after")
    def _only_what_is_read(self) -> OffloadSettings:
        for name in sorted(self.model_fields_set - {"to"}):
            if self.to == "none" or (name == "directory" and self.to != "file"):
                raise ValueError(f"`{name}` needs `to:` {'file' if name == 'directory' else 'host or file'}")
        return self


class KvCacheSettings(Section):
    """The paged KV cache."""

    read_by = (WITH_A_MODEL,)

    block_size: int = Field(16, ge=1, le=256, description="tokens per block; unset, TensorRT-LLM's or its engine's own")
    tokens: int | None = Field(
        None,
        ge=1,
        description="capacity in tokens, rounded up to whole blocks; null: on a CPU enough for a full batch of "
        f"{TOKENS_PER_SEQUENCE:,} each, on a GPU by `memory_fraction`; with TensorRT-LLM, "
        "tensorrt_llm.free_gpu_memory_fraction alone decides",
    )
    bytes: Annotated[int | None, PORTABLE_ONLY] = Field(
        None, ge=1, description="capacity in bytes, in place of `tokens`"
    )
    memory_fraction: Annotated[float | None, PORTABLE_ONLY] = Field(
        None,
        gt=0,
        lt=1,
        description="capacity as a share of the memory that weights, and on a GPU the largest step, leave, in place of "
        f"`tokens`; null: {GPU_MEMORY_FRACTION} on a GPU where nothing else says how much it holds",
    )
    dtype: Annotated[Literal["auto", "fp8", "int8", "bfloat16", "float32"], _PORTABLE_TYPES] = Field(
        "auto",
        description="auto: FP8 where the checkpoint was calibrated for it, else the type of the computation; int8: "
        "with a scale for each token and head; int8, bfloat16 and float32: the portable engine's",
    )
    prefix_reuse: bool = Field(True, description="keep finished blocks and reuse them for equal prefixes")
    eviction: Annotated[Literal["lru", "lfu", "prefix"], PORTABLE_ONLY] = Field(
        "lru",
        description="which block is forgotten first: lru: the least recently used; lfu: the least often used; prefix: "
        "the one whose prefix the fewest sequences shared, with age",
    )
    state_snapshots: Annotated[int | None, PORTABLE_ONLY] = Field(
        None,
        ge=0,
        description="of a model with recurrent layers: how many cached prefixes keep their state; null: as many as "
        "sequences run at once, where `bytes` or `memory_fraction` says the size at most a quarter of it",
    )
    state_snapshot_tokens: Annotated[int | None, PORTABLE_ONLY] = Field(
        None,
        ge=64,
        description="a long prompt leaves a snapshot of its state after each so many tokens, besides where it ends and "
        "where it departs from what is cached; a multiple of 64 and of `block_size`; null: about 1,024",
    )
    offload: Annotated[OffloadSettings, PORTABLE_ONLY] = OffloadSettings()

    @model_validator(mode="after")
    def _one_capacity(self) -> KvCacheSettings:
        given = [name for name in _CAPACITIES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"`{given[0]}` and `{given[1]}` both say how much it holds; give one")
        for name in ("eviction", "offload", "state_snapshots", "state_snapshot_tokens"):
            if name in self.model_fields_set and not self.prefix_reuse:
                raise ValueError(f"`{name}` needs `prefix_reuse: true`: without it no block is kept")
        return self

    @property
    def sized(self) -> bool:
        """Whether a capacity is given."""
        return any(getattr(self, name) is not None for name in _CAPACITIES)
