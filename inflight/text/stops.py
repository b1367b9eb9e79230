"""Stop strings: found in the text of a stream across token borders; nothing that may belong to one is shown before."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer


class StopMatcher:
    """Finds the first of several strings in a text that comes in parts.

    Only the last ``longest - 1`` characters are kept: a match that ends in the new part begins no earlier.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._tail = ""
        self._length = 0
        self.match_start: int | None = None
        """Where the match begins in the whole text (code points), once there is one."""

    @property
    def settled(self) -> int:
        """How many characters of the text can no longer be part of a match, or precede the match."""
        if self.match_start is not None:
            return self.match_start
        return self._length - self._open_suffix()

    @property
    def length(self) -> int:
        """Characters so far."""
        return self._length

    def push(self, text: str) -> bool:
        """Take the next part of the text; return whether a stop string has been found in the text so far."""
        if self.match_start is not None or not text:
            return self.match_start is not None
        window = self._tail + text
        offset = self._length - len(self._tail)
        self._length += len(text)
        # The match that ends first wins; of those that end together the longest, which begins first.
        ends = [(found + len(stop), found) for stop in self._stops if (found := window.find(stop)) >= 0]
        if ends:
            self.match_start = offset + min(ends)[1]
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        return bool(ends)

    def skip(self, text: str) -> None:
        """Take a part of the text in which no stop string counts, not even as the beginning of one."""
        self._length += len(text)
        self._tail = ""

    def _open_suffix(self) -> int:
        """Return the length of the longest suffix that begins a stop string."""
        for size in range(len(self._tail), 0, -1):
            suffix = self._tail[-size:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return size
        return 0


class StopTextLimit:
    """Follows one stream's tokens and says how much of its text may be shown."""

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

        Args:
            token: the next token id.
            may_stop: False while the stream must go on (``min_tokens``): what comes then is shown as it is.
        """
        text = self._detokenizer.push((token,))
        if may_stop:
            return self._matcher.push(text)
        self._matcher.skip(text)
        return False

    def finish(self) -> int:
        """Return the limit of the whole stream; what was held back is settled."""
        if not self.matched and not self._matcher.push(self._detokenizer.finish()):
            return self._matcher.length
        return self._matcher.settled
