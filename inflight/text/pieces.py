"""The spelling of each token, and the ways in which a tokenizer's decoder turns spellings into text.

The decoders of today's language models are few, and each is a rule from pieces to text that can be followed token by
token. The rules here are those of the ``tokenizers`` library (its ``decoders`` module), which remains the reference:
property tests hold a stream's text equal to its whole decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import tokenizers

from inflight.errors import DeploymentError


class Family(Enum):
    """How pieces become text."""

    BYTE_LEVEL = "byte level"
    """A character of a piece stands for a byte; the bytes of all pieces are one UTF-8 text (GPT-2, Llama 3, Qwen)."""
    BYTE_FALLBACK = "byte fallback"
    """Pieces are text; runs of ``<0xXX>`` are bytes of characters outside the vocabulary (Llama 2, Gemma, Phi-3)."""
    TEXT = "text"
    """Pieces are text, all of them (Unigram and BPE with Metaspace)."""


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from printable characters to the bytes they stand for.

    Printable Latin-1 bytes stand for themselves; the others, in order, for the code points from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = byte_alphabet()


class TokenPieces:
    """Looks up a token's piece, prepared for its family: bytes for BYTE_LEVEL, text or one byte otherwise."""

    def __init__(self, backend: tokenizers.Tokenizer, decoder: Mapping[str, Any] | None) -> None:
        """
        Raises:
            DeploymentError: the decoder is of a kind that is not supported, or its parts are not supported together.
        """
        self._backend = backend
        self._special = {id for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._replacements: list[tuple[str, str]] = []
        self.family = Family.TEXT
        self.leading_spaces = 0
        """How many spaces the whole text loses at its start."""
        self.drops_first_mark: str | None = None
        """The Metaspace mark, where the very first piece loses every one of it."""
        parts = _flattened(decoder)
        for part in parts:
            self._add(part)
        kinds = {part["type"] for part in parts} - {"Fuse"}
        if "ByteLevel" in kinds and len(kinds) > 1:
            raise DeploymentError(f"tokenizer.json: decoders {', '.join(sorted(kinds))} are not supported together")
        self._cache: dict[int, bytes | str | None] = {}

    def __getitem__(self, token: int) -> bytes | str | None:
        """Return the token's piece: bytes, or text, or None for special and unknown tokens, which have no text."""
        try:
            return self._cache[token]
        except KeyError:
            self._cache[token] = piece = self._prepare(token)
            return piece

    def first(self, token: int) -> bytes | str | None:
        """Return the piece of a token that begins the text."""
        piece = self[token]
        if self.drops_first_mark is None or not isinstance(piece, str):
            return piece
        return str(self._backend.id_to_token(token)).replace(self.drops_first_mark, "")

    def _prepare(self, token: int) -> bytes | str | None:
        piece = self._backend.id_to_token(token)
        if piece is None or token in self._special:
            return None
        if self.family is Family.BYTE_LEVEL:
            codes = [_BYTE_OF.get(character) for character in piece]
            return piece.encode() if None in codes else bytes(codes)  # type: ignore[arg-type]
        if self.family is Family.BYTE_FALLBACK and (byte := _fallback_byte(piece)) is not None:
            return byte
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return str(piece)

    def _add(self, part: Mapping[str, Any]) -> None:
        match part["type"]:
            case "ByteLevel":
                self.family = Family.BYTE_LEVEL
            case "ByteFallback":
                self.family = Family.BYTE_FALLBACK
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


def _flattened(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        raise DeploymentError("tokenizer.json: it has no decoder, so token ids have no text")
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _fallback_byte(piece: str) -> bytes | None:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            return None
    return None
