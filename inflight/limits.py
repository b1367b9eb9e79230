"""How much a request may ask for in words and token ids: the same limits before every stage that takes them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from inflight.deployment import LimitSettings
from inflight.errors import InvalidRequest
from inflight.inputs import Inputs


def check_words(inputs: Inputs, names: Iterable[str], limits: LimitSettings) -> None:
    """Check how many words these inputs have, before any is read, and how many bytes together.

    Args:
        inputs: the request's.
        names: of BYTES inputs with one word in each element.
        limits: the deployment's.

    Raises:
        InvalidRequest: naming the input, what it has and the limit.
    """
    for name in names:
        for row in range(inputs.rows):
            words = inputs.vector(name, row).reshape(-1)
            _check_number(name, words.size, "words", limits.max_words)
            _check_number(name, sum(map(len, words)), "bytes of words", limits.max_words_bytes)


def check_token_words(name: str, ids: np.ndarray, ends: np.ndarray, limits: LimitSettings) -> None:
    """Check the size of a word list of token ids: all ids [n], and the end of each word in them [n], padded with -1.

    The tokenizer stage spells each word in two ways, one with a space before it; a token stands for a byte at least.

    Raises:
        InvalidRequest: naming the input, what it has and the limit.
    """
    _check_number(name, int((ends >= 0).sum()), "words", 2 * limits.max_words)
    _check_number(name, ids.size, "token ids", 2 * (limits.max_words + limits.max_words_bytes))


def check_count(inputs: Inputs, name: str, limit: int) -> None:
    """Check how many elements an input has in each row.

    Raises:
        InvalidRequest: naming the input, what it has and the limit.
    """
    _check_number(name, inputs.vector(name, 0).size, "elements", limit)


def _check_number(name: str, number: int, unit: str, limit: int) -> None:
    if number > limit:
        raise InvalidRequest(f"{name} has {number} {unit}; the limit is {limit}")
