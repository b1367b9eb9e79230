"""Checks a request against the model that is to serve it, whichever engine does: names, values and limits."""

from __future__ import annotations

import math

from inflight.engine.request import Request
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.sampling import SamplingParams


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
    if len(_banned_for_good(sampling)) == vocab_size:
        raise every_token_is_banned()


def every_token_is_banned() -> InvalidRequest:
    """Return what a request ends with that leaves no token to choose from, whether at once or later."""
    return InvalidRequest(
        "embedding_bias, bad_words_list and min_tokens ban every token that could come next; they must leave one"
    )


def _banned_for_good(sampling: SamplingParams) -> set[int]:
    """Return the tokens that can come nowhere in a request's output."""
    alone = {bad[0] for bad in sampling.bad_sequences if len(bad) == 1}
    return alone | {token for token, bias in sampling.logit_bias.items() if bias == -math.inf}


def check_portable(request: Request, has_tokenizer: bool, by_client: bool, keeps_blocks: bool) -> None:
    """Check that the portable engine serves what a request asks for.

    Raises:
        UnsupportedFeature: naming what it does not serve.
        InvalidRequest: there are stop strings, and no tokenizer to find them with.
    """
    for name, given in (("guided_decoding_guide_type", request.sampling.guide), ("lora_name", request.lora)):
        if given:
            raise UnsupportedFeature(f"{name} is not supported by the portable engine")
    if request.client_id and not by_client:
        raise UnsupportedFeature("client_id is not supported by this deployment; set `batching.fairness: client`")
    if request.retention and not keeps_blocks:
        raise UnsupportedFeature("retention_* is not supported by this deployment; set `kv_cache.prefix_reuse: true`")
    if request.sampling.stop_strings and not has_tokenizer:
        raise InvalidRequest("stop_strings: this engine has no tokenizer")
