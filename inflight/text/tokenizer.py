"""A checkpoint's tokenizer: text to token ids and back, by the Rust ``tokenizers`` library.

Today's language models use a few decoders, and each is a rule from pieces to text that can be applied token by token.
The rules here are those of the library's ``decoders`` module, which remains the reference: property tests check that
the text of a stream equals its whole decoding.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from inflight.errors import DeploymentError
from inflight.gguf.checkpoint import open_gguf
from inflight.gguf.files import is_gguf
from inflight.precedence import overruled
from inflight.text.checkpoint import TextConfig, load_text_config
from inflight.text.files import read_file, read_json
from inflight.text.settled import TOKENIZER

log = logging.getLogger(__name__)


class DecoderKind(Enum):
    """How pieces become text."""

    BYTE_LEVEL = "byte level"
    """A character of a piece stands for a byte; the bytes of all pieces are one UTF-8 text (GPT-2, Llama 3, Qwen)."""
    BYTE_FALLBACK = "byte fallback"
    """Pieces are text; runs of ``<0xXX>`` are bytes of characters outside the vocabulary (Llama 2, Gemma, Phi-3)."""
    TEXT = "text"
    """Pieces are text, all of them (Unigram and BPE with Metaspace)."""


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to the bytes they stand for.

    Printable Latin-1 bytes stand for themselves; the others, in order, for the code points from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_FALLBACK_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


_LIKELY_CHARACTERS = 8
"""Characters of a token, at most, in nearly all texts."""
_PIECE_CHARACTERS = 1 << 14


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Raise ValueError where the library panics, as it does where an expression of the checkpoint backtracks for ever.

    Its own exception is none of Python's errors, and would pass whatever answers those.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError("the tokenizer's regular expression gave up on this text (too much backtracking)") from None


class Tokenizer:
    """Encodes and decodes. All requests and threads share it."""

    def __init__(self, backend: tokenizers.Tokenizer, config: TextConfig) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.config = config

    @classmethod
    def from_checkpoint(cls, directory: Path) -> Tokenizer:
        """Load ``tokenizer.json`` and what goes with it, of a checkpoint directory or of a GGUF file.

        Raises:
            DeploymentError: a file is missing, broken, or of a kind that is not supported; named in one line.
        """
        _held = open_gguf(directory) if is_gguf(directory) else None  # so that it is read once
        path = directory / "tokenizer.json"
        content = read_file(path)
        if content is None:
            raise DeploymentError(
                f"{path}: missing; save the checkpoint's tokenizer in the fast format "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
            )
        log.info("reading the tokenizer, of %.1f MiB", len(content) / 2**20)
        try:
            backend = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise DeploymentError(f"{path}: not a tokenizer: {error}") from None
        special = {token.content: id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        tokenizer = cls(backend, load_text_config(directory, backend.get_vocab(), special))
        tokenizer.compare_ends(read_json(directory / TOKENIZER, optional=True))
        _ = tokenizer.token_bytes  # an unsupported decoder stops the start, not the first request
        return tokenizer

    def compare_ends(self, settings: Mapping[str, Any]) -> None:
        """Log where ``tokenizer_config.json`` says of a text's beginning and end what ``tokenizer.json`` does not."""
        added = self._backend.encode("", add_special_tokens=True).ids
        for flag, token in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
            said, id = settings.get(flag), self.token_id(self.config.special_tokens.get(token, ""))
            if id is not None and isinstance(said, bool) and said != (id in added):
                has = "adds" if id in added else "does not add"
                overruled("beginning and end of a text", f"tokenizer.json, which {has} it", f"`{flag}`", said)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """How each token is spelt, and how pieces become text."""
        decoder = self._backend.decoder
        if decoder is None:
            raise DeploymentError("tokenizer.json: it has no decoder, so token ids have no text")
        # A decoder's pickled state is its part of tokenizer.json; the whole of that is megabytes.
        return TokenBytes(self._backend, json.loads(decoder.__getstate__()))

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The special tokens, which have no text, by their names in the vocabulary."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: id for id, token in added.items() if token.special}

    def token_id(self, text: str) -> int | None:
        """Return the token of this name in the vocabulary; None: there is none."""
        token = self._backend.token_to_id(text)
        return None if token is None else int(token)

    def token_text(self, token: int) -> str:
        """Return the name of a token in the vocabulary; '' for an id that it does not have."""
        return self.name_of(token) or ""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Return each text's token ids, by default as they stand inside a text; on all cores."""
        with _panics_are_errors():
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def excess(self, text: str, most: int) -> int | None:
        """Return how many tokens a text has at least, where these are certainly more than ``most``; None: it may fit.

        Only the beginning of a text that is far too long is encoded. It is cut into pieces, which have some tokens more
        than the whole at their ends, and a few where a word is cut; so twice as many as allowed are certainly too many.
        """
        if len(text) <= _LIKELY_CHARACTERS * most:
            return None
        found = 0
        for first in range(0, len(text), _PIECE_CHARACTERS):
            [ids] = self.encode_batch([text[first : first + _PIECE_CHARACTERS]])
            found += len(ids)
            if found > 2 * most:
                return found // 2
        return None

    def spelling(self, word: str) -> list[int]:
        """Return the token ids of one word; none where the vocabulary has no tokens for it."""
        try:
            return self.encode_batch([word])[0]
        except Exception:  # the library raises bare Exception
            return []

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence, by default without special tokens."""
        with _panics_are_errors():
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def pieces(self, ids: Sequence[int]) -> list[str | None]:
        """Return each token as the vocabulary spells it; None for an id without a token."""
        return [self._backend.id_to_token(id) for id in ids]

    def name_of(self, token: int) -> str | None:
        """Return how the vocabulary spells a token, such as ``<|im_end|>``; None: it has no such token."""
        return self._backend.id_to_token(token)


class TokenBytes(dict[int, bytes | str | None]):
    """What each token stands for, looked up when it is first met: bytes for BYTE_LEVEL, text or one byte otherwise.

    Special and unknown tokens, which have no text, are None.
    """

    def __init__(self, backend: tokenizers.Tokenizer, decoder: Mapping[str, Any]) -> None:
        """
        Raises:
            DeploymentError: the decoder is of a kind that is not supported, or its parts are not supported together.
        """
        self._backend = backend
        self._special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._replacements: list[tuple[str, str]] = []
        self.decoder = DecoderKind.TEXT
        self.leading_spaces = 0
        """How many spaces the whole text loses at its start."""
        self.drops_first_mark: str | None = None
        """The Metaspace mark, where the very first piece loses every one of it."""
        parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        for part in parts:
            self._add(part)
        kinds = {part["type"] for part in parts} - {"Fuse"}
        if "ByteLevel" in kinds and len(kinds) > 1:
            raise DeploymentError(f"tokenizer.json: decoders {', '.join(sorted(kinds))} are not supported together")

    def _add(self, part: Mapping[str, Any]) -> None:
        match part["type"]:
            case "ByteLevel":
                self.decoder = DecoderKind.BYTE_LEVEL
            case "ByteFallback":
                self.decoder = DecoderKind.BYTE_FALLBACK
            case "Fuse":
                pass
            case "Replace" if "String" in part["pattern"]:
                self._replacements.append((part["pattern"]["String"], part["content"]))
            case "Strip" if part["content"] == " " and not part["stop"]:
                self.leading_spaces = part["start"]
            case "Metaspace":
                self._replacements.append((part["replacement"], " "))
                if part.get("prepend_scheme", "always") != "never":
                    self.drops_first_mark = part["replacement"]
            case kind:
                raise DeploymentError(
                    f"tokenizer.json: decoder {kind} is not supported; supported: ByteLevel, ByteFallback, Fuse, "
                    "Replace of a string, Strip of leading spaces, Metaspace"
                )

    def __missing__(self, token: int) -> bytes | str | None:
        self[token] = piece = self._look_up(token)
        return piece

    def _look_up(self, token: int) -> bytes | str | None:
        piece = self._backend.id_to_token(token)
        if piece is None or token in self._special:
            return None
        if self.decoder is DecoderKind.BYTE_LEVEL:
            codes = [_BYTE_OF.get(character) for character in piece]
            return piece.encode() if None in codes else bytes(codes)  # type: ignore[arg-type]
        if self.decoder is DecoderKind.BYTE_FALLBACK and (byte := _FALLBACK_BYTE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return str(piece)

    def first(self, token: int) -> bytes | str | None:
        """Return the piece of a token that begins the text."""
        piece = self[token]
        if self.drops_first_mark is None or not isinstance(piece, str):
            return piece
        return str(self._backend.id_to_token(token)).replace(self.drops_first_mark, "")
