"""Texts of a given length in tokens, made of words that are one token each wherever they stand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from inflight.load.scenario import ScenarioError

_WORD = re.compile(r"[Ġ▁]([a-z]{2,})")
"""A vocabulary's entry for a whole word: byte-level and Metaspace tokenizers mark the space before it."""
_ENOUGH = 50
"""Words; with fewer, two texts would often begin alike, and share cached blocks that they should not share."""


class PromptWriter:
    """Writes texts that a tokenizer turns into an exact number of tokens, parts joined by spaces included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            ScenarioError: the vocabulary has too few whole words to write from.
        """
        self._tokenizer = tokenizer
        self.special_tokens = len(tokenizer.encode("").ids)
        """Tokens that the tokenizer adds to every text, such as a begin of sequence."""
        self._words = self._single_tokens()
        if len(self._words) < _ENOUGH:
            raise ScenarioError(f"the tokenizer has {len(self._words)} whole words; {_ENOUGH} are needed for prompts")

    @classmethod
    def of_checkpoint(cls, model: Path) -> PromptWriter:
        """Return the writer for a checkpoint directory.

        Raises:
            ScenarioError: its tokenizer cannot be read.
        """
        path = model / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ScenarioError(f"{path}: cannot be read: {error}") from None
        return cls(tokenizer)

    def write(self, tokens: int, generator: np.random.Generator) -> str:
        """Return a text of ``tokens`` tokens, special ones not counted; joined to another by a space, the sum."""
        return " ".join(self._words[generator.integers(len(self._words), size=max(tokens, 0))])

    def count(self, text: str) -> int:
        """Return the tokens of any text, special ones not counted."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _single_tokens(self) -> np.ndarray:
        """Return the words of the vocabulary that are one token at a text's begin and after a space alike."""
        found = sorted(match[1] for name in self._tokenizer.get_vocab() if (match := _WORD.fullmatch(name)))
        encode = self._tokenizer.encode_batch
        alone = encode(found, add_special_tokens=False)
        pairs = encode([f"{word} {word}" for word in found], add_special_tokens=False)
        fits = [len(one.ids) == 1 and len(two.ids) == 2 for one, two in zip(alone, pairs, strict=True)]
        return np.array([word for word, fit in zip(found, fits, strict=True) if fit], dtype=object)


def join(*parts: str) -> str:
    """Return the parts that are not empty, joined by spaces."""
    return " ".join(part for part in parts if part)
