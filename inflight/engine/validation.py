"""Checks a request against the model that is to serve it, whichever engine does: names, values and limits."""

from __future__ import annotations

from inflight.engine.request import Request
from inflight.errors import InvalidRequest


def check_request(request: Request, vocab_size: int, max_length: int) -> None:
    """Check a request against the model; safe to call from any thread.

    Args:
        request: to check.
        vocab_size: token ids are below it.
        max_length: tokens of prompt and output together.

    Raises:
        InvalidRequest: naming the field, the value and the limit.
    """
    if not request.prompt:
        raise InvalidRequest("input_ids is empty; it must have at least one token")
    if len(request.prompt) >= max_length:
        raise InvalidRequest(
            f"input_ids: the prompt length ({len(request.prompt)} tokens) exceeds the limit; "
            f"prompt and output may have {max_length} tokens together"
        )
    sampling = request.sampling
    named = {
        "input_ids": request.prompt,
        "embedding_bias": list(sampling.logit_bias),
        "bad_words_list": [token for bad in sampling.bad_sequences for token in bad],
    }
    for name, tokens in named.items():
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"{name} has token {wrong}; it must be between 0 and {vocab_size - 1}")
