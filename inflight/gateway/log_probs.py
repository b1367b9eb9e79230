"""Log-probs by token, in step with the text: the bytes of all tokens, joined, are the text of the answer.

A token's log-prob is shown when its text is: a character of several tokens holds all of them back, and the tokens of a
stop string are left out, the last one before it cut where the text is cut. The tokens of an unfinished character, which
the text leaves out at its end, are there with their bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inflight.text.detokenizer import UNREADABLE, IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer

_LEAST = -9999.0
"""In place of minus infinity, which JSON cannot write; OpenAI's own number for tokens that are very unlikely."""
Likeliest = Sequence[tuple[int, float]]
"""Tokens with their log-probs, the best first."""


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """A token of the answer with its log-prob."""

    token: int
    log_prob: float | None
    """None: of the first token of a prompt, which nothing predicts."""
    top: Likeliest
    bytes: bytes
    """Its part of the text, in UTF-8; empty for a special token."""


@dataclass(slots=True)
class _Group:
    """Tokens that become text together: one, or several that share a character."""

    start: int
    """Where the text begins in the whole, in characters."""
    tokens: list[TokenLogProb] = field(default_factory=list)
    text: str = ""

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def whole(self) -> list[TokenLogProb]:
        """Return the tokens with all of their bytes."""
        raw = b"".join(token.bytes for token in self.tokens)
        if codecs.getincrementaldecoder("utf-8")("replace").decode(raw) == self.text:  # without an unfinished character
            return self.tokens
        if len(self.tokens) == 1:
            return [replace(self.tokens[0], bytes=self.text.encode())]
        if self.text == UNREADABLE * len(raw):  # a run of byte tokens, each of which is replaced
            return [replace(token, bytes=UNREADABLE.encode() * len(token.bytes)) for token in self.tokens]
        return _without_first(self.tokens, len(raw) - len(self.text.encode()))

    def until(self, end: int) -> list[TokenLogProb]:
        """Return the tokens that make the text before ``end``, the last one cut there."""
        left = self.text[: end - self.start].encode()
        kept = []
        for token in self.whole():
            if not left:
                break
            part, left = left[: len(token.bytes)], left[len(token.bytes) :]
            kept.append(replace(token, bytes=part))
        return kept


def _without_first(tokens: Sequence[TokenLogProb], size: int) -> list[TokenLogProb]:
    """Return tokens without their first bytes: those of spaces with which a text does not begin."""
    kept = []
    for token in tokens:
        kept.append(replace(token, bytes=token.bytes[size:]))
        size = max(0, size - len(token.bytes))
    return kept


class LogProbStream:
    """The log-probs of one choice as they come."""

    def __init__(self, tokenizer: Tokenizer, show_special: bool = False) -> None:
        """``show_special``: special tokens have bytes, as they are shown in the text."""
        self._tokenizer, self._show_special = tokenizer, show_special
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._groups: list[_Group] = []
        self._open = _Group(0)

    def push(self, tokens: Sequence[int], log_probs: Sequence[float | None], top: Sequence[Likeliest]) -> None:
        """Take the next tokens, with the log-prob and the likeliest tokens of each."""
        likeliest = top or [()] * len(tokens)
        for token, log_prob, best in zip(tokens, log_probs, likeliest, strict=True):
            if self._detokenizer.held_bytes and isinstance(self._tokenizer.token_bytes[token], str):
                self._open.text += self._detokenizer.end_run()
                self._close_group()
            self._open.tokens.append(TokenLogProb(token, log_prob, best, token_bytes(self._tokenizer, token)))
            self._open.text += self._detokenizer.push((token,))
            if self._detokenizer.settled:
                self._close_group()

    def take(self, shown: int) -> list[TokenLogProb]:
        """Return what belongs to the first ``shown`` characters of the text, and has not been returned."""
        count = 0
        while count < len(self._groups) and self._groups[count].end <= shown:
            count += 1
        ready, self._groups = self._groups[:count], self._groups[count:]
        return self._shown(token for group in ready for token in group.whole())

    def finish(self, shown: int) -> list[TokenLogProb]:
        """Return the rest, of a text that has ``shown`` characters in the end."""
        self._open.text += self._detokenizer.finish()
        self._close_group()
        rest = self.take(shown)
        if self._groups and self._groups[0].start < shown:
            rest += self._shown(self._groups[0].until(shown))
        return rest

    def _shown(self, tokens: Iterable[TokenLogProb]) -> list[TokenLogProb]:
        """Return tokens with the bytes that the answer shows; those of special tokens count in no text before."""
        if not self._show_special:
            return list(tokens)
        return [replace(one, bytes=one.bytes or token_bytes(self._tokenizer, one.token, True)) for one in tokens]

    def _close_group(self) -> None:
        if self._open.tokens:
            self._groups.append(self._open)
            self._open = _Group(self._open.end)


class TextOffsets:
    """Where the texts of tokens begin in the text that all of them make, in characters.

    A token that begins within a character has the place of that character.
    """

    def __init__(self, start: int = 0) -> None:
        """``start``: the place of the first token."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.end = start
        """How many characters are whole so far."""

    def push(self, raw: bytes) -> int:
        """Take the bytes of the next token; return where it begins."""
        within = self._within
        text = self._utf8.decode(raw[:1])
        # A character that does not go on is replaced before the new byte counts.
        broken = within and bool(text) and (len(text) > 1 or self._within)
        place = self.end + broken
        self.end += len(text) + len(self._utf8.decode(raw[1:]))
        return place

    @property
    def _within(self) -> bool:
        """Whether the last character is not whole yet."""
        return bool(self._utf8.getstate()[0])


def token_bytes(tokenizer: Tokenizer, token: int, show_special: bool = False) -> bytes:
    """Return what a token stands for inside a text, as UTF-8; nothing for a special token, unless it is shown."""
    piece = tokenizer.token_bytes[token]
    if piece is None:
        return tokenizer.token_text(token).encode() if show_special else b""
    return piece if isinstance(piece, bytes) else piece.encode()


def json_log_prob(log_prob: float) -> float:
    """Return a log-prob as JSON can write it."""
    return max(log_prob, _LEAST)


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are named in answers."""

    tokenizer: Tokenizer
    broken: str = ""
    """What the name of a token begins with that is no whole text; its bytes follow as escapes."""
    as_ids: bool = False
    """``token_id:5`` for all tokens."""

    def name(self, token: int, raw: bytes | None = None) -> str:
        """Return the name of a token; ``raw``: its bytes in the text, where they are known."""
        if self.as_ids:
            return f"token_id:{token}"
        spelt = token_bytes(self.tokenizer, token) if raw is None else raw
        if not spelt:
            return self.tokenizer.token_text(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return self.broken + "".join(f"\\x{byte:02x}" for byte in spelt)


def chat_log_probs(entries: Sequence[TokenLogProb], names: TokenNames) -> dict[str, Any]:
    """Return ``logprobs`` of a chat's choice."""
    return {"content": [chat_entry(entry, names) for entry in entries], "refusal": None}


def chat_entry(entry: TokenLogProb, names: TokenNames) -> dict[str, Any]:
    """Return a token's log-prob as chats and responses have it."""
    named = _named(entry.token, entry.log_prob or 0.0, names, entry.bytes)
    return named | {"top_logprobs": [_named(token, value, names) for token, value in entry.top]}


def _named(token: int, log_prob: float, names: TokenNames, raw: bytes | None = None) -> dict[str, Any]:
    spelt = token_bytes(names.tokenizer, token) if raw is None else raw
    return {"token": names.name(token, raw), "logprob": json_log_prob(log_prob), "bytes": list(spelt)}
