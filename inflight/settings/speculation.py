"""Speculative decoding: its settings, and what they mean for building an engine and for serving it.

An engine is built for one shape of drafts, and must be served with the same: both derive it here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from inflight.errors import DeploymentError
from inflight.settings.section import COMPILED, PORTABLE_ONLY, VALUE_OF_ENGINES_ALONE, WITH_A_MODEL, ReadBy, Section

_UPSTREAMS_OWN_TOKENS, _UPSTREAMS_OWN_DEPTH, _UPSTREAMS_OWN_INNER_NODES = 63, 4, 10


_TENSORRT_LLMS = ReadBy(("trtllm", "tensorrtllm"), VALUE_OF_ENGINES_ALONE, ("eagle", "medusa", "lookahead"))
_OF_COMPILED_ENGINES = ReadBy(
    ("tensorrtllm",), f"`{{key}}: {{value}}` needs a compiled engine: {COMPILED}", ("medusa", "lookahead")
)


class SpeculationSettings(Section):
    """Speculative decoding."""

    read_by = (WITH_A_MODEL,)

    method: Annotated[
        Literal["draft_target", "eagle", "medusa", "lookahead", "ngram"] | None, _TENSORRT_LLMS, _OF_COMPILED_ENGINES
    ] = Field(None, description="null: none; the portable engine has draft_target and ngram")
    draft_model: Path | None = Field(
        None, description="checkpoint of the draft model, or of EAGLE's or Medusa's heads, relative to the deployment"
    )
    max_draft_tokens: int = Field(4, ge=1, description="tokens drafted per step, at most")
    max_ngram_size: int = Field(3, ge=1, description="ngram and lookahead: longest n-gram")
    window_size: int = Field(4, ge=1, description="lookahead: window")
    verification_set_size: int = Field(4, ge=1, description="lookahead: candidates checked per step")
    medusa_heads: int = Field(4, ge=1, description="medusa: heads")
    candidates: Annotated[int, PORTABLE_ONLY] = Field(
        1, ge=1, le=8, description="portable engine: guesses of each next token, checked together as a tree"
    )
    adaptive: Annotated[bool, PORTABLE_ONLY] = Field(
        True, description="portable engine: draft less, or nothing, where drafts cost more time than they save"
    )

    @property
    def most_drafts(self) -> int:
        """The most drafts of one sequence that a step of the portable engine verifies: those of a whole tree."""
        return self.max_draft_tokens * self.candidates if self.method else 0

    @model_validator(mode="after")
    def _only_what_the_method_reads(self) -> SpeculationSettings:
        reads = _READ_BY_METHOD[self.method]
        for name in self.model_fields_set - {"method"} - reads:
            users = ", ".join(method for method, names in _READ_BY_METHOD.items() if method and name in names)
            raise ValueError(f"`{name}` needs `method:` {users}; it is {self.method or 'null'}")
        if "draft_model" in reads and self.draft_model is None:
            raise ValueError(f"`method: {self.method}` needs `draft_model`")
        return self


_READ_BY_METHOD: dict[str | None, set[str]] = {
    None: set(),
    "draft_target": {"draft_model", "max_draft_tokens", "candidates", "adaptive"},
    "eagle": {"draft_model", "max_draft_tokens"},
    "medusa": {"draft_model", "max_draft_tokens", "medusa_heads"},
    "lookahead": {"max_ngram_size", "window_size", "verification_set_size"},
    "ngram": {"max_draft_tokens", "max_ngram_size", "candidates", "adaptive"},
}
"""The settings that each method of speculative decoding reads."""


@dataclass(frozen=True)
class DraftTree:
    """The drafts of Medusa and EAGLE. Nodes are draft tokens, and a path from the root is a possible continuation."""

    tokens: int
    depth: int
    """Tokens that one step may add."""
    most_inner_nodes_of_a_layer: int
    paths: tuple[tuple[int, ...], ...] | None
    """Each node as the ranks of the drafts on the path to it; None: upstream's own tree, ``mc_sim_7b_63``."""


def draft_tree(settings: SpeculationSettings) -> DraftTree:
    """Return the tree for ``max_draft_tokens``: 63 is upstream's own tree, less is a chain of the likeliest tokens.

    Raises:
        DeploymentError: Medusa has not as many heads as the tree is deep.
    """
    tokens = settings.max_draft_tokens
    if tokens == _UPSTREAMS_OWN_TOKENS:
        tree = DraftTree(tokens, _UPSTREAMS_OWN_DEPTH, _UPSTREAMS_OWN_INNER_NODES, None)
    else:
        tree = DraftTree(tokens, tokens, 1, tuple((0,) * length for length in range(1, tokens + 1)))
    if settings.method == "medusa" and settings.medusa_heads < tree.depth:
        raise DeploymentError(
            f"speculation.max_draft_tokens is {tokens}, a tree {tree.depth} deep; "
            f"with {settings.medusa_heads} Medusa heads it must be {settings.medusa_heads} at most, or 63"
        )
    return tree


def draft_length(settings: SpeculationSettings) -> int:
    """Return the most tokens that are verified in one step; 0 without speculation.

    Lookahead with window W, n-grams of N and G candidates: (N - 2) + (W - 1 + G) (N - 1), by TensorRT-LLM's
    documentation of lookahead decoding.
    """
    if settings.method == "lookahead":
        window, size, candidates = settings.window_size, settings.max_ngram_size, settings.verification_set_size
        return max(0, size - 2) + (window - 1 + candidates) * (size - 1)
    return settings.max_draft_tokens if settings.method else 0
