"""Vocabulary: a model's tokens as llguidance has them, and the masks of the tokens that grammars allow.

llguidance gets each token as the bytes that our own detokenizer makes of it, so that what a grammar accepts is what the
client reads. Behind the model's vocabulary it has one token more, which stands for the end: a grammar allows it where
the text may end, whichever ids end the request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

if TYPE_CHECKING:  # what checks guides does not need it
    from inflight.text.tokenizer import Tokenizer

WORD = 32
"""Bits of a mask's words."""


class Vocabulary:
    """The tokens of a model, shared by all guides."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """``size``: the model's, which may be more than the tokenizer's; tokens without a text are never allowed."""
        self.size = size
        self.end = size
        """The token that stands for the end; no model makes it."""
        self.words = (size + WORD) // WORD
        """Words of a mask: a bit for each token and one for the end."""
        self.table = TokenTable(tokenizer, size)
        self._special = frozenset(self.table.special_token_ids)
        self.tokens = self.table.tokenizer()

    def masks(self, matchers: Sequence[LLMatcher]) -> tuple[np.ndarray, list[float]]:
        """Return what each matcher allows next, and the seconds of CPU time that each mask has taken.

        One thread computes them: matchers of one guide share a lexer, which one mask has for itself while it is made.

        Returns:
            int32 ``[n, words]``, a bit for each token, the lowest bit first; and ``n`` times.
        """
        masks = np.zeros((len(matchers), self.words), np.int32)
        address, row_bytes = masks.ctypes.data, masks.strides[0]
        times = [time.thread_time()]
        for row, matcher in enumerate(matchers):
            matcher.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
            times.append(time.thread_time())
        return masks, [end - begin for begin, end in pairwise(times)]

    def has_text(self, token: int) -> bool:
        """Return whether a token is a part of texts; others are special, and stand in a text only by their names."""
        return token not in self._special

    def everything(self) -> np.ndarray:
        """Return the mask that allows every token of the model: int32 ``[words]``."""
        mask = np.full(self.words, -1, np.int32)
        clear_bit(mask, self.end)
        return mask


def has_bit(mask: np.ndarray, token: int) -> bool:
    """Return whether a mask ``[words]`` allows a token."""
    return bool(int(mask[token // WORD]) >> token % WORD & 1)


def set_bit(mask: np.ndarray, token: int) -> None:
    """Allow a token in a mask ``[words]``."""
    mask.view(np.uint32)[token // WORD] |= np.uint32(1 << token % WORD)


def clear_bit(mask: np.ndarray, token: int) -> None:
    """Forbid a token in a mask ``[words]``."""
    mask.view(np.uint32)[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)


class TokenTable:
    """The tokens as ``TokenizerWrapper`` wants them. It can be sent to another process, which cannot encode by it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.eos_token_id = size
        self.special_token_ids = [size]
        self.tokens: list[bytes] = []
        for token in range(size):
            piece = tokenizer.token_bytes[token]
            if piece is None:
                self.special_token_ids.append(token)
                piece = tokenizer.name_of(token) or f"<unused token {token}>"
            self.tokens.append(piece if isinstance(piece, bytes) else piece.encode())
        self.tokens.append(b"<end of the text>")
        self._encode: Callable[[str], list[int]] | None = tokenizer.spelling

    def tokenizer(self) -> LLTokenizer:
        """Return llguidance's tokenizer of these tokens, with a trie of them."""
        return LLTokenizer(TokenizerWrapper(self))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_encode": None}

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text. Masks do not use it: our grammars tell llguidance to force no tokens."""
        if not isinstance(text, str) or self._encode is None:
            raise TypeError("the text is bytes; the wrapper decodes them")
        return self._encode(text)
