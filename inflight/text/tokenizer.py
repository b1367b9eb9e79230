"""A checkpoint's tokenizer: text to token ids and back, by the Rust ``tokenizers`` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from inflight.errors import DeploymentError
from inflight.text.checkpoint import TextConfig, load_text_config
from inflight.text.pieces import TokenPieces


class Tokenizer:
    """Encodes and decodes; shared by all requests and threads."""

    def __init__(self, backend: tokenizers.Tokenizer, config: TextConfig) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.config = config

    @classmethod
    def from_checkpoint(cls, directory: Path) -> Tokenizer:
        """Load ``tokenizer.json`` and what goes with it.

        Raises:
            DeploymentError: a file is missing, broken, or of a kind that is not supported; named in one line.
        """
        path = directory / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except FileNotFoundError:
            raise DeploymentError(
                f"{path}: missing; save the checkpoint's tokenizer in the fast format "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
            ) from None
        except OSError as error:
            raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from None
        except Exception as error:  # the library raises bare Exception
            raise DeploymentError(f"{path}: not a tokenizer: {error}") from None
        tokenizer = cls(backend, load_text_config(directory, backend.get_vocab()))
        _ = tokenizer.pieces  # an unsupported decoder stops the start, not the first request
        return tokenizer

    @cached_property
    def pieces(self) -> TokenPieces:
        """How each token is spelt, and how pieces become text."""
        decoder = self._backend.decoder
        # A decoder's pickled state is its part of tokenizer.json; the whole of that is megabytes.
        return TokenPieces(self._backend, None if decoder is None else json.loads(decoder.__getstate__()))

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Return each text's token ids; on all cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of words as they stand inside a text: without special tokens."""
        return self.encode_batch(words, add_special_tokens=False)

    def spelling(self, word: str) -> list[int]:
        """Return the token ids of one word; none where the vocabulary has no tokens for it."""
        try:
            return self.encode_words([word])[0]
        except Exception:  # the library raises bare Exception
            return []

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a whole sequence, without special tokens."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))
