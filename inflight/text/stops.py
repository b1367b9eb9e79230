"""Stop strings: the search for them in a stream's text, across the borders of tokens.

Where a model may think, its answer's text alone is searched, by the gateway (``gateway.shown_stops``); else as follows.

The engine searches, with a ``StopTextLimit`` in each sequence, because a match ends the sequence. It decodes for this,
but sends no text, only how many characters may be shown (``text_limit``). The detokenizer stage decodes the same tokens
and holds back the rest (``detokenizer.StreamText``). Upstream's C++ backend knows no stop strings: behind it
``upstream_answers`` does both in the detokenizer stage.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import DecoderKind, Tokenizer

_SEPARATOR = b"\xff"
"""A byte that occurs in no UTF-8 text, so that no search matches across two pieces."""
MAX_STOP_SEQUENCES = 512
"""Most stop sequences of one request: an engine compares each at each step, and hundreds of tokens have a newline."""


class StopMatcher:
    """Finds the first of several strings in a text that comes in parts.

    A text ends with an *open* part: the longest suffix that begins one of the strings. It is all of the text that the
    matcher keeps, and the next character either makes it longer or makes it begin later. So a character of text costs
    two searches of the sorted strings on average, however many there are, and mostly one look-up.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._sorted = sorted(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._ending: defaultdict[str, list[str]] = defaultdict(list)
        """The strings by their last character."""
        for stop in stops:
            self._ending[stop[-1]].append(stop)
        self._followed, self._open = "", 0
        """One of the strings, and how many of its first characters are the open part of the text."""
        self.length = 0
        """Characters so far."""
        self.match_start: int | None = None
        """Where the match begins in the whole text (code points), once there is one."""

    @property
    def settled(self) -> int:
        """How many characters of the text can no longer be part of a match, or precede the match."""
        return self.length - self._open if self.match_start is None else self.match_start

    def push(self, text: str) -> bool:
        """Take the next part of the text; return whether a stop string has been found in the text so far."""
        if self.match_start is not None:
            return True
        for end, character in enumerate(text, self.length + 1):
            if ending := self._ending.get(character):
                possible = self._followed[: self._open] + character
                if longest := max(map(len, filter(possible.endswith, ending)), default=0):
                    self.match_start = end - longest
                    break
            self._follow(character)
        self.length += len(text)
        return self.match_start is not None

    def skip(self, text: str) -> None:
        """Take a part of the text in which no stop string counts, not even as the beginning of one."""
        self.length += len(text)
        self._open = 0

    def _follow(self, character: str) -> None:
        """Take the next character into the open part, which begins where one of the strings can go on with it."""
        if self._open and self._followed[self._open] == character:
            self._open += 1
            return
        text = self._followed[: self._open] + character
        for start in range(len(text)):
            if text[start] in self._first:
                suffix = text[start:]
                place = bisect_left(self._sorted, suffix)
                if place < len(self._sorted) and self._sorted[place].startswith(suffix):
                    self._followed, self._open = self._sorted[place], len(suffix)
                    return
        self._open = 0


class StopTextLimit:
    """Follows one sequence's tokens in the engine: says when a stop string has come and how much text may be shown."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = StopMatcher(stops)

    @property
    def matched(self) -> bool:
        """Whether a stop string has been found."""
        return self._matcher.match_start is not None

    @property
    def limit(self) -> int:
        """How many characters of the stream's text may be shown."""
        return self._matcher.settled

    def push(self, token: int, may_stop: bool = True) -> bool:
        """Take the next token; return whether a stop string has been found.

        ``may_stop`` is False while the stream must go on (``min_tokens``): such text is shown without a search.
        """
        text = self._detokenizer.push((token,))
        if may_stop:
            return self._matcher.push(text)
        self._matcher.skip(text)
        return False

    def finish(self) -> int:
        """End the stream, which settles its last characters; return how many of all its characters may be shown."""
        if not self.matched and not self._matcher.push(self._detokenizer.finish()):
            return self._matcher.length
        return self._matcher.settled


class StopTokens:
    """Finds the token sequences that certainly bring a stop string into the text, by a search of the vocabulary.

    An engine that knows tokens and no text stops at them, and so computes fewer tokens behind a stop string.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = tokenizer.token_bytes.decoder is DecoderKind.BYTE_LEVEL
        pieces = [self._piece(token) for token in range(tokenizer.config.vocab_size)]
        self._starts = [0, *accumulate(len(piece) + len(_SEPARATOR) for piece in pieces)]
        self._joined = _SEPARATOR.join(pieces)

    def sequences(self, word: str, most: int = MAX_STOP_SEQUENCES) -> list[list[int]]:
        """Return spellings of ``word``, and then single tokens that have it in them; ``most`` of them.

        A text contains the string, whatever stands before, once one of these sequences has come.
        """
        spellings = map(self._tokenizer.spelling, (word, f" {word}"))
        certain = [tuple(tokens) for tokens in spellings if word.encode() in self._certain_text(tokens)]
        found = dict.fromkeys([*certain, *((token,) for token in self._tokens(word.encode(), most))])
        return [list(one) for one in found][:most]

    def special(self, word: str) -> int | None:
        """Return the special token of this name, which has no text; None: there is none."""
        tokens = self._tokenizer.spelling(word)
        return tokens[0] if len(tokens) == 1 and self._tokenizer.token_bytes[tokens[0]] is None else None

    def _tokens(self, word: bytes, most: int) -> list[int]:
        found: list[int] = []
        place = self._joined.find(word)
        while place >= 0 and len(found) < most:
            token = bisect_right(self._starts, place) - 1
            found.append(token)
            place = self._joined.find(word, self._starts[token] + len(self._piece(token)))
        return found

    def _certain_text(self, tokens: Sequence[int]) -> bytes:
        if self._byte_level:
            return b"".join(map(self._piece, tokens))
        # A byte-fallback token is text only together with the bytes beside it.
        pieces = (self._tokenizer.token_bytes[token] for token in tokens)
        return "".join(piece if isinstance(piece, str) else "\0" for piece in pieces).lstrip(" ").encode()

    def _piece(self, token: int) -> bytes:
        """Return what a token adds to any text; spaces that a text may lose at its start are no part of it."""
        piece = self._tokenizer.token_bytes[token]
        if self._byte_level:
            return piece if isinstance(piece, bytes) else b""
        return piece.lstrip(" ").encode() if isinstance(piece, str) else b""
