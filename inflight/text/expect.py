"""What the tokenizer stage tells the detokenizer of requests to upstream's C++ backend, which hands nothing through.

How a request may end (most tokens, end ids, stop strings) is known where it begins and needed where it ends. A
response of upstream's says whose it is by little: the request id, its row, the prompt where it comes back, and which
optional outputs it has. Two of these outputs are therefore a *mark*: it tells a stream from a whole answer, and
requests that are alike in all else, and are to end otherwise, from each other.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from inflight.errors import InvalidRequest

MARKS = {"return_num_output_tokens": 1, "return_perf_metrics": 2}
"""The engine's inputs that ask for the outputs that are marks, and what each counts."""
STREAM_MARKS, MARKS_OF_WHOLE, MARKS_WITH_TIMES = (2,), (0, 1, 3), (3,)
"""Of streams, which need the times; of whole answers; and of those whose client asks for the times."""
PERF_OUTPUTS = frozenset(
    "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns "
    "first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens "
    "total_draft_tokens".split()
)
ASKED_BY = {
    "return_num_input_tokens": frozenset({"num_input_tokens"}),
    "return_num_output_tokens": frozenset({"num_output_tokens"}),
    "return_perf_metrics": PERF_OUTPUTS,
    "final_perf_metrics": frozenset({"final_perf_metrics"}),
}
"""The client's flags, and the outputs of theirs, which may come for our own sake too."""
OWN_SAKE = frozenset({"num_input_tokens", "num_output_tokens"}) | PERF_OUTPUTS
_STALE_S = 120.0
"""After so long without a sign a request is taken to have failed before its first response, if its mark is needed."""
_MOST, _MOST_CHARACTERS = 65_536, 64 << 20
"""Most entries, and characters of all that they hold."""

_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Expected:
    """How a row of a request may end, and what its client asked for."""

    max_tokens: _Count
    """Most tokens, the context's limit included."""
    min_tokens: _Count
    end_ids: tuple[int, ...]
    """None of them is shown; upstream leaves out the first, and ends with the others as with stop words."""
    stops: tuple[Annotated[str, Field(min_length=1)], ...]
    prompt_tokens: _Count
    echo: bool
    """Whether the prompt comes before the answer."""
    sequences: Annotated[int, Field(ge=1)]
    """Return sequences of this row."""
    asked: tuple[str, ...]
    """Outputs that the client asked for, of those that may come for our own sake; ``final_perf_metrics``: those."""

    def outputs(self, final: bool) -> Iterable[str]:
        """Return what the client gets of these outputs, with its last response or with another."""
        return OWN_SAKE & {*self.asked, *(PERF_OUTPUTS if final and "final_perf_metrics" in self.asked else ())}


def digest(prompt: Sequence[int]) -> str:
    """Return what stands for a prompt that comes back; for a stream's, which does not, stands its length."""
    return hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Announcement:
    """One request, before the engine gets it."""

    request_id: str
    digests: tuple[str, ...]
    """What stands for each row's prompt."""
    rows: tuple[Expected, ...]
    marks: tuple[int, ...]
    """Those that it can have, the best first."""


_ANNOUNCEMENTS = TypeAdapter(list[Announcement])


def write(announcements: Sequence[Announcement]) -> bytes:
    """Return announcements as the detokenizer reads them."""
    return _ANNOUNCEMENTS.dump_json(list(announcements))


def read(told: np.ndarray) -> list[Announcement]:
    """Read what ``write`` has written, the one element of an array.

    Raises:
        InvalidRequest: it is something else; any client can call the detokenizer.
    """
    try:
        announcements = _ANNOUNCEMENTS.validate_json(told.item())
    except (ValidationError, ValueError):  # the latter: not one element
        announcements = None
    if announcements is None or any(len(one.digests) != len(one.rows) for one in announcements):
        raise InvalidRequest("expectation is not what the tokenizer's stage sends")
    return announcements


_Place = tuple[str, int, str, int]
"""Request id, row, digest of the prompt, mark."""


@dataclass(slots=True)
class _Entry:
    expected: Expected
    open: int
    """Sequences that have not ended."""
    request: int | None
    """Number of the request that it is of; None: of several, which are alike."""
    heard: float
    """When it was announced, or last heard of."""

    def stale(self, now: float) -> bool:
        return now - self.heard > _STALE_S


class Expectations:
    """What has been announced, until it has ended; one that never ends goes when many others are newer."""

    def __init__(self) -> None:
        self._entries: OrderedDict[_Place, _Entry] = OrderedDict()
        """What was heard of last comes last."""
        self._places: defaultdict[str, set[_Place]] = defaultdict(set)
        """By request id."""
        self._announced = self._characters = 0

    def announce(self, announcement: Announcement) -> int | None:
        """Take a request; return its mark, or None if all marks are taken by requests that are to end otherwise."""
        now = time.monotonic()
        for usable in (self._free, self._outdated):
            for mark in announcement.marks:
                rows = list(zip(_places(announcement, mark), announcement.rows, strict=True))
                if all(usable(place, row, now) for place, row in rows):
                    self._announced += 1
                    for place, row in rows:
                        self._take(place, row, now)
                    return mark
        return None

    def find(self, place: _Place) -> Expected | None:
        """Return what was announced of a response."""
        entry = self._entries.get(place)
        return None if entry is None else entry.expected

    def heard(self, place: _Place) -> None:
        """One of its sequences goes on."""
        if (entry := self._entries.get(place)) is not None:
            entry.heard = time.monotonic()
            self._entries.move_to_end(place)

    def ended(self, place: _Place) -> None:
        """One sequence of it has ended."""
        entry = self._entries.get(place)
        if entry is None:
            return
        entry.open -= 1
        if entry.open <= 0:
            self._remove(place)

    def alone(self, place: _Place, *, whole: bool = False) -> bool:
        """Return whether ``stop`` with the id of this request ends it only: no other that runs has the id.

        Args:
            place: of the request.
            whole: it may end all its sequences; False: there must be one.
        """
        if not place[0] or place not in self._entries:
            return False
        now = time.monotonic()
        running = [one for other in self._places[place[0]] if not (one := self._entries[other]).stale(now)]
        if sum(one.open for one in running) == 1:
            return True
        requests = {one.request for one in running}
        return whole and len(requests) == 1 and None not in requests

    def __len__(self) -> int:
        return len(self._entries)

    def _free(self, place: _Place, row: Expected, _: float) -> bool:
        entry = self._entries.get(place)
        return entry is None or entry.expected == row

    def _outdated(self, place: _Place, row: Expected, now: float) -> bool:
        return self._free(place, row, now) or self._entries[place].stale(now)

    def _take(self, place: _Place, row: Expected, now: float) -> None:
        entry = self._entries.get(place)
        if entry is not None:
            self._remove(place)
        if entry is None or entry.expected != row:
            entry = _Entry(row, 0, self._announced, now)
        else:
            entry.request, entry.heard = None, now
        entry.open += row.sequences
        self._entries[place] = entry
        self._places[place[0]].add(place)
        self._characters += _characters(place, row)
        while len(self._entries) > _MOST or (self._characters > _MOST_CHARACTERS and len(self._entries) > 1):
            self._remove(next(iter(self._entries)))

    def _remove(self, place: _Place) -> None:
        self._characters -= _characters(place, self._entries.pop(place).expected)
        self._places[place[0]].remove(place)
        if not self._places[place[0]]:
            del self._places[place[0]]


def _places(announcement: Announcement, mark: int) -> list[_Place]:
    return [(announcement.request_id, row, one, mark) for row, one in enumerate(announcement.digests)]


def _characters(place: _Place, row: Expected) -> int:
    """Return how much an entry holds, in characters: what has no limit of its own where any client can announce."""
    return len(place[0]) + len(place[2]) + sum(map(len, (*row.stops, *row.asked))) + 8 * len(row.end_ids)
