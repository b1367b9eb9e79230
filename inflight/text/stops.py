"""Stop strings: found in the text of a stream across token borders; nothing that may belong to one is shown before."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer


class StopMatcher:
    """Finds the first of several strings in a text that comes in parts.

    A text ends with an *open* part: the longest suffix that begins one of the strings. It is all of the text that the
    matcher keeps, and the next character either makes it longer or makes it begin later. So a character of text costs
    two searches of the sorted strings on average, however many there are, and mostly one look-up.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._sorted = sorted(stops)
        self._first = frozenset(stop[0] for stop in stops)
        ending: defaultdict[str, list[str]] = defaultdict(list)
        for stop in stops:
            ending[stop[-1]].append(stop)
        self._ending = {character: tuple(found) for character, found in ending.items()}
        """The strings by their last character."""
        self._followed, self._open = "", 0
        """A string, and how many of its first characters are the text's open part."""
        self._length = 0
        self.match_start: int | None = None
        """Where the match begins in the whole text (code points), once there is one."""

    @property
    def settled(self) -> int:
        """How many characters of the text can no longer be part of a match, or precede the match."""
        return self._length - self._open if self.match_start is None else self.match_start

    @property
    def length(self) -> int:
        """Characters so far."""
        return self._length

    def push(self, text: str) -> bool:
        """Take the next part of the text; return whether a stop string has been found in the text so far."""
        if self.match_start is not None:
            return True
        for end, character in enumerate(text, self._length + 1):
            if match := self._match(character):
                self.match_start = end - match
                break
            self._follow(character)
        self._length += len(text)
        return self.match_start is not None

    def skip(self, text: str) -> None:
        """Take a part of the text in which no stop string counts, not even as the beginning of one."""
        self._length += len(text)
        self._open = 0

    def _match(self, character: str) -> int:
        """Return the length of the longest string that the next character ends; 0: it ends none."""
        ending = self._ending.get(character, ())
        if not ending:
            return 0
        text = self._followed[: self._open] + character
        return max(map(len, filter(text.endswith, ending)), default=0)

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
