"""Log-probs by token, in step with the text: the bytes of all tokens, joined, are the text of the answer.

A token's log-prob is shown when its text is: a character of several tokens holds all of them back, and the tokens of a
stop string are left out, the last one before it cut where the text is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inflight.text.detokenizer import IncrementalDetokenizer
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
        if len(self.tokens) == 1 and self.text:
            return [replace(self.tokens[0], bytes=self.text.encode())]
        return self.tokens

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
            raw = token_bytes(self._tokenizer, token, self._show_special)
            self._open.tokens.append(TokenLogProb(token, log_prob, best, raw))
            self._open.text += self._detokenizer.push((token,))
            if self._detokenizer.settled:
                self._close_group()

    def take(self, shown: int) -> list[TokenLogProb]:
        """Return what belongs to the first ``shown`` characters of the text, and has not been returned."""
        count = 0
        while count < len(self._groups) and self._groups[count].end <= shown:
            count += 1
        ready, self._groups = self._groups[:count], self._groups[count:]
        return [token for group in ready for token in group.whole()]

    def finish(self, shown: int) -> list[TokenLogProb]:
        """Return the rest, of a text that has ``shown`` characters in the end."""
        self._open.text += self._detokenizer.finish()
        self._close_group()
        rest = self.take(shown)
        if self._groups and self._groups[0].start < shown:
            rest += self._groups[0].until(shown)
        return rest

    def _close_group(self) -> None:
        if self._open.tokens:
            self._groups.append(self._open)
            self._open = _Group(self._open.end)


def token_bytes(tokenizer: Tokenizer, token: int, show_special: bool = False) -> bytes:
    """Return what a token stands for inside a text, as UTF-8; nothing for a special token, unless it is shown."""
    piece = tokenizer.token_bytes[token]
    if piece is None:
        return tokenizer.token_text(token).encode() if show_special else b""
    return piece if isinstance(piece, bytes) else piece.encode()


def number(log_prob: float) -> float:
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
    return {"content": [_chat_entry(entry, names) for entry in entries], "refusal": None}


def _chat_entry(entry: TokenLogProb, names: TokenNames) -> dict[str, Any]:
    named = _named(entry.token, entry.log_prob or 0.0, names, entry.bytes)
    return named | {"top_logprobs": [_named(token, value, names) for token, value in entry.top]}


def _named(token: int, log_prob: float, names: TokenNames, raw: bytes | None = None) -> dict[str, Any]:
    spelt = token_bytes(names.tokenizer, token) if raw is None else raw
    return {"token": names.name(token, raw), "logprob": number(log_prob), "bytes": list(spelt)}
