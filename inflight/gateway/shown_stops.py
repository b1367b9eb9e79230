"""Stop strings of an answer with reasoning: they are looked for in what the user is shown, and not in the reasoning.

The engine searches raw text, which is right where all of it is the answer. Where a model may think, the gateway itself
searches the answer's text, and ends the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inflight.text.output.events import ContentDelta, OutputEvent
from inflight.text.stops import StopMatcher


class ShownStops:
    """Searches the text of one choice for stop strings, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str], show: bool) -> None:
        """``show``: whether the string that ends the choice is shown."""
        self._stops, self._show = stops, show
        self._matcher = StopMatcher(stops)
        self._held = ""
        self.found: str | None = None
        """The string that has ended the choice."""

    @property
    def held(self) -> int:
        """How many characters at the end of the text so far are not shown."""
        shown = len(self.found) if self.found and self._show else 0
        return self._matcher.length - self._matcher.settled - shown

    def take(self, events: Iterable[OutputEvent], *, ends: bool, may_stop: bool = True) -> list[OutputEvent]:
        """Return what is shown of the next events.

        Args:
            events: what the next tokens say.
            ends: whether these are the last.
            may_stop: whether the choice may end by now (``min_tokens``); else their text is shown without a search.
        """
        shown = list[OutputEvent]()
        for event in events:
            if self.found is not None:
                return shown
            if isinstance(event, ContentDelta):
                shown += self._read(event.text, may_stop)
            else:  # what stands between two texts parts them: no string goes across
                shown += [*self._rest(), event]
        return shown + (self._rest() if ends and self.found is None else [])

    def _read(self, new: str, may_stop: bool) -> list[OutputEvent]:
        before = self._matcher.length - len(self._held)
        text = self._held + new
        if may_stop:
            self._matcher.push(new)
        else:
            self._matcher.skip(new)
        count = self._matcher.settled - before
        ready, self._held = text[:count], text[count:]
        if self._matcher.match_start is not None:
            self.found = min(filter(self._held.startswith, self._stops), key=len)
            ready += self.found if self._show else ""
        return [ContentDelta(ready)] if ready else []

    def _rest(self) -> list[OutputEvent]:
        rest, self._held = self._held, ""
        self._matcher.skip("")
        return [ContentDelta(rest)] if rest else []
