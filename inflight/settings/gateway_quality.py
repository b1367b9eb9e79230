"""GatewayQualitySettings: answers re-scored by a reference deployment. docs/quality-in-production.md describes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from inflight.settings.door import check_address
from inflight.settings.section import Section

Address = Annotated[str, AfterValidator(check_address)]


class GatewayQualitySettings(Section):
    """A share of the answers is scored again by a reference deployment, and what differs is a metric."""

    sample_ratio: float = Field(
        0, ge=0, le=1, allow_inf_nan=False, description="share of the requests whose answers are scored again; 0: none"
    )
    reference: Address | None = Field(
        None,
        description="host:port of the reference's gRPC, whose model `tensorrt_llm` has the same tokenizer and returns "
        "log-probs of prompts. Prompts and answers are sent there, not encrypted",
    )
    max_waiting: int = Field(64, ge=1, description="answers that wait for the reference; one more is left out")
    timeout_s: float = Field(
        60, gt=0, le=3600, allow_inf_nan=False, description="seconds that the reference has for one answer"
    )

    @model_validator(mode="after")
    def _has_reference(self) -> GatewayQualitySettings:
        if self.sample_ratio and self.reference is None:
            raise ValueError(f"sample_ratio is {self.sample_ratio:g}; it needs a reference")
        return self
