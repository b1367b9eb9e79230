"""Which stops TensorRT-LLM can be told, so that it ends a generation by itself: an abort costs it more than an end.

Only those that are one token are told, where that token always ends the sequence here too, in the same place.
"""

from __future__ import annotations

from collections.abc import Set

from inflight.sampling import SamplingParams
from inflight.text.stops import StopTextLimit
from inflight.text.tokenizer import Tokenizer


def single_stop_tokens(sampling: SamplingParams, tokenizer: Tokenizer) -> Set[int]:
    """Return the tokens that are a stop string, or a stop sequence, of the request.

    TensorRT-LLM keeps to no ``min_tokens`` for them; a request with more than one has all its stops matched here.
    """
    if sampling.min_tokens > 1:
        return set()
    sequences = {stop[0] for stop in sampling.stop_sequences if len(stop) == 1}
    words = ((text, tokenizer.spelling(text)) for text in sampling.stop_strings)
    alone = {ids[0] for text, ids in words if len(ids) == 1 and _has_text(ids[0], text, tokenizer)}
    return sequences | alone


def _has_text(token: int, text: str, tokenizer: Tokenizer) -> bool:
    """Return whether the token brings all of the text, even as the first, which may lose a space."""
    return StopTextLimit(tokenizer, [text]).push(token)
