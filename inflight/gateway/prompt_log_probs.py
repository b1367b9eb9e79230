"""``prompt_logprobs``: the log-probs of a prompt's tokens, as vLLM writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight import contract
from inflight.gateway.context import Gateway
from inflight.gateway.fields import Fields, unsupported
from inflight.gateway.generation import PromptScores
from inflight.gateway.log_probs import TokenNames, json_log_prob


def asked_prompt_log_probs(fields: Fields, gateway: Gateway) -> int | None:
    """Return how many of the likeliest tokens at each position a request asks for; None: for no log-probs.

    Raises:
        ApiError: 400: the deployment's engine has none.
    """
    count: int | None = fields.get("prompt_logprobs")
    engine = gateway.deployment.engine.kind
    if count is not None and not contract.ENGINE_INPUT["num_prompt_log_probs"].served(engine):
        raise unsupported("prompt_logprobs", f"prompt_logprobs is not supported by the engine {engine}")
    return count


def prompt_log_probs(
    prompt: Sequence[int], scores: PromptScores, count: int, names: TokenNames
) -> list[dict[str, Any] | None]:
    """Return what stands for each token of a prompt: None for the first, which nothing predicts.

    Each other position has the token itself and ``count`` of the likeliest ones, by their ids. The rank of a token that
    is none of these is not known.
    """
    top = scores.top or [[]] * len(scores.log_probs)
    return [
        None,
        *(
            {str(token): _entry(token, value, None, names)}
            | {str(one): _entry(one, score, rank, names) for rank, (one, score) in enumerate(likeliest[:count], 1)}
            for token, value, likeliest in zip(prompt[1:], scores.log_probs, top, strict=True)
        ),
    ]


def _entry(token: int, value: float, rank: int | None, names: TokenNames) -> dict[str, Any]:
    return {"logprob": json_log_prob(value), "rank": rank, "decoded_token": names.name(token)}
