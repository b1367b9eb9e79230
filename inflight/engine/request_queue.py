"""RequestQueue: which sequences wait, which of them is next, and whose deadline has passed. Both engines use it.

It knows sort keys, clients and deadlines, but neither blocks nor budgets. Without fairness the sequence with the
smallest sort key is next. With fairness it is the first sequence of the client with the smallest counter of served
tokens: the Virtual Token Counter (VTC) of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024,
arXiv:2401.00588). The counter grows when tokens are computed. When a client begins to wait, its counter is raised to
the smallest of those that wait, so that a client gains nothing from a time without requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from inflight.engine.sequence import Sequence

REMEMBERED_CLIENTS = 4096
"""With more clients than this, those without waiting requests are forgotten and count as new when they come back."""
_SORT_KEY, _DEADLINE, _SERVED_TOKENS = map(attrgetter, ("sort_key", "request.deadline_ns", "served_tokens"))


@dataclass(slots=True, eq=False)
class _Client:
    served_tokens: int = 0
    """The virtual token counter: tokens computed for it, and what the counter was raised by."""
    waiting: list[Sequence] = field(default_factory=list)
    """Its waiting sequences, by their sort keys."""


class RequestQueue:
    """The waiting sequences, and the deadlines of all sequences that have not ended.

    A sequence is added once, waits, is popped to run, may be pushed to wait again, and is removed when it ends.
    """

    def __init__(self, fair: bool) -> None:
        """``fair``: whether the least served client is next; else all requests count as one client's."""
        self._fair = fair
        self._waiting: dict[Sequence, None] = {}
        self.num_paused = 0
        """How many of those that wait were preempted."""
        self._clients: dict[str, _Client] = {}
        self._waiting_clients: list[_Client] = []
        """The clients that have sequences in the queue, in the order in which they began to wait."""
        self._last_waiting = _Client()
        """The client that stopped waiting last."""
        self._deadlines: list[Sequence] = []
        """The sequences with a deadline, waiting or running, that have neither ended nor expired, by deadline."""
        self._expired: list[Sequence] = []
        """The sequences that cannot be served in time, until ``take_expired`` returns them."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """The sequences that wait, in no particular order."""
        return iter(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue and watch its deadline until it is removed."""
        self.push(sequence)
        if sequence.request.deadline_ns is not None:
            insort(self._deadlines, sequence, key=_DEADLINE)

    def push(self, sequence: Sequence) -> None:
        """Put a sequence into the queue: a new one, or one that was preempted."""
        client = self._client_of(sequence)
        if not client.waiting:
            client.served_tokens = max(client.served_tokens, self._min_counter())
            self._waiting_clients.append(client)
        self._waiting[sequence] = None
        self.num_paused += sequence.metrics.preemptions > 0
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
        _discard(self._deadlines, sequence, _DEADLINE)
        self._expired.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ends, whether it waits, runs or has expired."""
        if sequence.request.deadline_ns is not None:
            _discard(self._deadlines, sequence, _DEADLINE)
            if sequence in self._expired:
                self._expired.remove(sequence)
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
        """Add computed tokens to a client's counter; without fairness there are no counters."""
        if self._fair:
            self._client(client_id).served_tokens += tokens

    def _stop_waiting(self, sequence: Sequence) -> None:
        del self._waiting[sequence]
        self.num_paused -= sequence.metrics.preemptions > 0
        client = self._client_of(sequence)
        _discard(client.waiting, sequence, _SORT_KEY)
        if not client.waiting:
            self._waiting_clients.remove(client)
            self._last_waiting = client

    def _client_of(self, sequence: Sequence) -> _Client:
        return self._client(sequence.request.client_id if self._fair else "")

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= REMEMBERED_CLIENTS + len(self._waiting):
                self._clients = {known: one for known, one in self._clients.items() if one.waiting}
            client = self._clients[name] = _Client(self._min_counter())
        return client

    def _min_counter(self) -> int:
        """Return the smallest counter of the clients that wait; if none waits, that of the client that stopped last."""
        return (self._least_served() if self._waiting else self._last_waiting).served_tokens

    def _least_served(self) -> _Client:
        return min(self._waiting_clients, key=_SERVED_TOKENS)


def _discard(ordered: list[Sequence], sequence: Sequence, key: Callable[[Sequence], Any]) -> None:
    """Take a sequence out of a list that is ordered by ``key``, if it is there."""
    index = bisect_left(ordered, key(sequence), key=key)
    while index < len(ordered) and key(ordered[index]) == key(sequence):
        if ordered[index] is sequence:
            del ordered[index]
            return
        index += 1
