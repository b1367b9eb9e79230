"""The draft tokens of one step of speculative decoding: fixed when an engine is built, said again when it is served."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.deployment import SpeculationSettings
from inflight.errors import DeploymentError

_UPSTREAMS_OWN_TOKENS, _UPSTREAMS_OWN_DEPTH, _UPSTREAMS_OWN_INNER_NODES = 63, 4, 10


@dataclass(frozen=True)
class DraftTree:
    """What Medusa and EAGLE propose. Nodes are draft tokens; a path from the root is one guess of what comes next."""

    tokens: int
    depth: int
    """Tokens that one step may add."""
    most_inner_nodes_of_a_layer: int
    choices: str | None
    """The paths in the notation of upstream's parameters; None: upstream's own tree, ``mc_sim_7b_63``."""


def draft_tree(settings: SpeculationSettings) -> DraftTree:
    """Return the tree for ``max_draft_tokens``: 63 is upstream's own tree, less is a chain of the likeliest tokens.

    Raises:
        DeploymentError: Medusa has not as many heads as the tree is deep.
    """
    tokens = settings.max_draft_tokens
    if tokens == _UPSTREAMS_OWN_TOKENS:
        tree = DraftTree(tokens, _UPSTREAMS_OWN_DEPTH, _UPSTREAMS_OWN_INNER_NODES, None)
    else:
        paths = ", ".join("{" + ", ".join(["0"] * length) + "}" for length in range(1, tokens + 1))
        tree = DraftTree(tokens, tokens, 1, paths)
    if settings.method == "medusa" and settings.medusa_heads < tree.depth:
        raise DeploymentError(
            f"speculation.max_draft_tokens is {tokens}, a tree {tree.depth} deep; "
            f"with {settings.medusa_heads} Medusa heads it must be {settings.medusa_heads} at most, or 63"
        )
    return tree


def draft_length(settings: SpeculationSettings) -> int:
    """Return the most tokens that are verified in one step.

    Lookahead with window W, n-grams of N and G candidates: (N - 2) + (W - 1 + G) (N - 1), by TensorRT-LLM's
    documentation of lookahead decoding.
    """
    if settings.method == "lookahead":
        window, size, candidates = settings.window_size, settings.max_ngram_size, settings.verification_set_size
        return max(0, size - 2) + (window - 1 + candidates) * (size - 1)
    return settings.max_draft_tokens
