"""What the tokenizer stage tells the detokenizer of requests to upstream's C++ backend, which hands nothing through.

How a request may end (most tokens, end ids, stop strings) is known where it begins and needed where it ends. A
response of upstream's says whose it is by little: the request id, its row, the prompt where it comes back, and which
optional outputs it has. Two of these outputs are therefore a *mark*: it tells a stream from a whole answer, and
requests that are alike in all else, and are to end otherwise, from each other.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import TypeAdapter, ValidationError

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
"""After so long a request is taken to have failed before the detokenizer saw it, if its mark is needed."""
_MOST = 65_536


@dataclass(frozen=True)
class Expected:
    """How a row of a request may end, and what its client asked for."""

    max_tokens: int
    """Most tokens, the context's limit included."""
    min_tokens: int
    end_ids: tuple[int, ...]
    """None of them is shown; upstream leaves out the first, and ends with the others as with stop words."""
    stops: tuple[str, ...]
    prompt_tokens: int
    echo: bool
    """Whether the prompt comes before the answer."""
    sequences: int
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


def read(data: bytes) -> list[Announcement]:
    """Read what ``write`` has written.

    Raises:
        InvalidRequest: it is something else; any client can call the detokenizer.
    """
    try:
        return _ANNOUNCEMENTS.validate_json(data)
    except ValidationError:
        raise InvalidRequest("expectation is not what the tokenizer's stage sends") from None


_Place = tuple[str, int, str, int]
"""Request id, row, digest of the prompt, mark."""


@dataclass(slots=True)
class _Entry:
    expected: Expected
    open: int
    """Sequences that have not ended."""
    told: float


class Expectations:
    """What has been announced, until it has ended; one that never ends goes when many others are newer."""

    def __init__(self) -> None:
        self._entries: OrderedDict[_Place, _Entry] = OrderedDict()
        self._open: Counter[str] = Counter()
        """Sequences that have not ended, by request id."""

    def announce(self, announcement: Announcement) -> int | None:
        """Take a request; return its mark, or None if all marks are taken by requests that are to end otherwise."""
        now = time.monotonic()
        for mark in announcement.marks:
            places = self._places(announcement, mark)
            if all(self._free(place, row, now) for place, row in zip(places, announcement.rows, strict=True)):
                for place, row in zip(places, announcement.rows, strict=True):
                    self._take(place, row, now)
                return mark
        return None

    def find(self, place: _Place) -> Expected | None:
        """Return what was announced of a response."""
        entry = self._entries.get(place)
        return None if entry is None else entry.expected

    def ended(self, place: _Place) -> None:
        """One sequence of it has ended."""
        entry = self._entries.get(place)
        if entry is None:
            return
        entry.open -= 1
        self._close(place[0], 1)
        if entry.open <= 0:
            del self._entries[place]

    def alone(self, place: _Place) -> bool:
        """Return whether a request has one sequence, and none other that runs has its id: ``stop`` ends it only."""
        return bool(place[0]) and self._open[place[0]] == 1

    def __len__(self) -> int:
        return len(self._entries)

    @staticmethod
    def _places(announcement: Announcement, mark: int) -> list[_Place]:
        return [(announcement.request_id, row, one, mark) for row, one in enumerate(announcement.digests)]

    def _free(self, place: _Place, row: Expected, now: float) -> bool:
        entry = self._entries.get(place)
        return entry is None or entry.expected == row or now - entry.told > _STALE_S

    def _take(self, place: _Place, row: Expected, now: float) -> None:
        entry = self._entries.pop(place, None)
        if entry is not None and entry.expected != row:
            self._close(place[0], entry.open)
            entry = None
        self._entries[place] = _Entry(row, (entry.open if entry else 0) + row.sequences, now)
        self._open[place[0]] += row.sequences
        while len(self._entries) > _MOST:
            oldest, gone = self._entries.popitem(last=False)
            self._close(oldest[0], gone.open)

    def _close(self, request_id: str, sequences: int) -> None:
        self._open[request_id] -= sequences
        if self._open[request_id] <= 0:
            del self._open[request_id]
