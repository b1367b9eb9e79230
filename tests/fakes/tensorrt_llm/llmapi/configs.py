"""The configuration classes, made from the recorded tables, with the rules between their fields."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from pydantic import model_validator

from tensorrt_llm.tables import LLM_ARGS, Strict, model


class CapacitySchedulerPolicy(StrEnum):
    """The scheduler's policies."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


KvCacheConfig = model("KvCacheConfig", LLM_ARGS["KvCacheConfig"])
SchedulerConfig = model("SchedulerConfig", LLM_ARGS["SchedulerConfig"])


class CudaGraphConfig(model("_CudaGraphConfig", LLM_ARGS["CudaGraphConfig"])):  # type: ignore[misc]
    """CUDA graphs."""

    @model_validator(mode="after")
    def _sizes_agree(self) -> CudaGraphConfig:
        sizes, most = self.batch_sizes, self.max_batch_size
        if sizes and (min(sizes) < 1 or (most and max(sizes) != most)):
            raise ValueError("batch_sizes and max_batch_size do not agree")
        return self


class SpeculativeConfig(Strict):
    """Base of the methods of speculative decoding."""

    needs: ClassVar[tuple[str, ...]] = ()
    backends: ClassVar[str] = ""

    @model_validator(mode="after")
    def _complete(self) -> SpeculativeConfig:
        if "max_draft_len>0" in self.needs and not (getattr(self, "max_draft_len", None) or 0) > 0:
            raise ValueError("max_draft_len must be > 0")
        if "speculative_model" in self.needs and not getattr(self, "speculative_model_dir", None):
            raise ValueError("a draft model must be provided")
        return self

    def supports_backend(self, backend: str) -> bool:
        """Return whether a flow has this method."""
        known = self.backends.lower()
        return "both" in known or (backend in known if backend == "pytorch" else "tensorrt" in known)


def _speculative(name: str) -> Any:
    table = next(value for key, value in LLM_ARGS["speculative"]["classes"].items() if name in key)
    made = model(name, LLM_ARGS["speculative"]["base"] + table["fields"], base=SpeculativeConfig)
    made.needs, made.backends = tuple(table.get("requires", ())), table["backends"]  # type: ignore[attr-defined]
    return made


DraftTargetDecodingConfig = _speculative("DraftTargetDecodingConfig")
EagleDecodingConfig = _speculative("EagleDecodingConfig")
MedusaDecodingConfig = _speculative("MedusaDecodingConfig")
LookaheadDecodingConfig = _speculative("LookaheadDecodingConfig")
NGramDecodingConfig = _speculative("NGramDecodingConfig")
