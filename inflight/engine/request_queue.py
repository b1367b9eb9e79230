"""RequestQueue: which sequences wait, which of them is next, and whose deadline has passed. Both engines use it.

It knows sort keys, clients and deadlines; not blocks, not budgets. Without fairness the sequence of the smallest sort
key is next. With fairness, the client that has been served least is next, with its first sequence: the virtual token
counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv:2401.00588), charged for each
token when it is computed. A client that begins to wait is lifted to the least served of those that wait, so that having
been away earns nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from inflight.engine.sequence import Sequence

REMEMBERED_CLIENTS = 4096
"""Beyond so many, clients that do not wait are forgotten; when they come back they begin as new ones do."""
_SORT_KEY, _DEADLINE, _SERVED_TOKENS = map(attrgetter, ("sort_key", "request.deadline_ns", "served_tokens"))


@dataclass(slots=True, eq=False)
class _Client:
    served_tokens: int = 0
    """Virtual tokens: those computed for it, and those that it was lifted by."""
    waiting: list[Sequence] = field(default_factory=list)
    """Its sequences that wait, by their sort keys."""


class RequestQueue:
    """Sequences that wait, and the deadlines of all that have not ended.

    A sequence is added once, waits, is popped to run, may be pushed to wait again, and is removed when it ends.
    """

    def __init__(self, fair: bool) -> None:
        """``fair``: whether clients take turns; else all are one."""
        self._fair = fair
        self._waiting: dict[Sequence, None] = {}
        self._clients: dict[str, _Client] = {}
        self._waiting_clients: list[_Client] = []
        """The clients that have sequences in the queue, in the order in which they began to wait."""
        self._last = _Client()
        """The client that was the last to stop waiting."""
        self._deadlines: list[Sequence] = []
        """The sequences with a deadline that have neither ended nor expired, by their deadlines."""
        self._expired: list[Sequence] = []
        """Those that cannot be served in time, until they are taken."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences that wait, in no particular order."""
        return iter(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Take in a new sequence, which waits; its deadline is watched until it is removed."""
        self.push(sequence)
        if sequence.request.deadline_ns is not None:
            insort(self._deadlines, sequence, key=_DEADLINE)

    def push(self, sequence: Sequence) -> None:
        """Have a sequence wait: a new one, or one that was preempted."""
        client = self._client_of(sequence)
        if not client.waiting:
            client.served_tokens = max(client.served_tokens, self._level())
            self._waiting_clients.append(client)
        self._waiting[sequence] = None
        insort(client.waiting, sequence, key=_SORT_KEY)

    @property
    def first(self) -> Sequence:
        """The next sequence. There must be one."""
        return self._least_served().waiting[0]

    def pop(self) -> Sequence:
        """Take out the next sequence, which runs from now on, and return it."""
        sequence = self.first
        self._stop_waiting(sequence)
        return sequence

    def expire_first(self) -> None:
        """Take out the next sequence because it cannot be served in time; ``take_expired`` returns it."""
        sequence = self.pop()
        self._deadlines.remove(sequence)
        self._expired.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ends, whether it waits, runs or has expired."""
        for known in (self._deadlines, self._expired):
            if sequence in known:
                known.remove(sequence)
        if sequence in self._waiting:
            self._stop_waiting(sequence)

    def take_expired(self, now_ns: int) -> list[Sequence]:
        """Return, once, the sequences that cannot be served in time, or whose deadline is not after ``now_ns``."""
        count = bisect_right(self._deadlines, now_ns, key=_DEADLINE)
        expired, self._expired = self._expired + self._deadlines[:count], []
        del self._deadlines[:count]
        return expired

    def seconds_to_deadline(self, now_ns: int) -> float:
        """Return the seconds to the next deadline; infinity: there is none."""
        return max(0.0, (_DEADLINE(self._deadlines[0]) - now_ns) / 1e9) if self._deadlines else math.inf

    def charge(self, client_id: str, tokens: int) -> None:
        """Count so many tokens as computed for a client; where clients do not take turns, that says nothing."""
        if self._fair:
            self._client(client_id).served_tokens += tokens

    def _stop_waiting(self, sequence: Sequence) -> None:
        del self._waiting[sequence]
        client = self._client_of(sequence)
        client.waiting.remove(sequence)
        if not client.waiting:
            self._waiting_clients.remove(client)
            self._last = client

    def _client_of(self, sequence: Sequence) -> _Client:
        return self._client(sequence.request.client_id if self._fair else "")

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= REMEMBERED_CLIENTS + len(self._waiting):
                self._clients = {known: one for known, one in self._clients.items() if one.waiting}
            client = self._clients[name] = _Client(self._level())
        return client

    def _level(self) -> int:
        """Return where a client begins: at the least served that waits, or the last that did."""
        return (self._least_served() if self._waiting else self._last).served_tokens

    def _least_served(self) -> _Client:
        return min(self._waiting_clients, key=_SERVED_TOKENS)
