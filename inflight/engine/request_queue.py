"""RequestQueue: which sequences wait, which of them is next, and whose deadline has passed. Both engines use it.

It knows sort keys, clients and deadlines; not blocks, not budgets. Without fairness the sequence of the smallest sort
key is next. With fairness, the client that has been served least is next, with its first sequence: the virtual token
counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv:2401.00588), charged for each
token when it is computed. A client that begins to wait is lifted to the least served of those that wait, so that having
been away earns nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from inflight.engine.sequence import Sequence, SortKey

REMEMBERED_CLIENTS = 4096
"""Beyond so many, clients that do not wait are forgotten; when they come back they begin as new ones do."""
_STALE = 64
"""Deadlines of ended sequences that are kept whatever the number of the others."""


@dataclass(slots=True)
class _Client:
    served_tokens: int = 0
    """Virtual tokens: those computed for it, and those that it was lifted by."""
    waiting: int = 0
    offered: bool = False
    """Whether it has an entry in the heap of clients."""
    heap: list[tuple[SortKey, Sequence]] = field(default_factory=list)
    """Its sequences; those that have left stay until they come up."""


class RequestQueue:
    """Sequences that wait, and the deadlines of all that have not ended. Operations take logarithmic time, amortized.

    A sequence is added once, waits, is popped to run, may be pushed to wait again, and is removed when it ends.
    """

    def __init__(self, fair: bool) -> None:
        """
        Args:
            fair: whether clients take turns; else all are one.
        """
        self._fair = fair
        self._waiting: dict[Sequence, None] = {}
        self._clients: dict[str, _Client] = {}
        self._offers: list[tuple[int, int, _Client]] = []
        """Heap of (served_tokens, turn, client), one entry per client that waits; ``served_tokens`` may lag behind."""
        self._turns = 0
        self._last = _Client()
        """The client that was the last to stop waiting."""
        self._timed: set[Sequence] = set()
        """The sequences with a deadline that have not ended."""
        self._deadlines: list[tuple[int, int, Sequence]] = []
        """Heap of (deadline, order, sequence); those that have ended stay until they come up or are too many."""
        self._deadlines_limit = _STALE
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
        if sequence.request.deadline_ns is None:
            return
        if len(self._deadlines) >= self._deadlines_limit:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._timed]
            heapq.heapify(self._deadlines)
            self._deadlines_limit = 2 * len(self._deadlines) + _STALE
        self._timed.add(sequence)
        heapq.heappush(self._deadlines, (sequence.request.deadline_ns, sequence.order, sequence))

    def push(self, sequence: Sequence) -> None:
        """Have a sequence wait: a new one, or one that was preempted."""
        client = self._client_of(sequence)
        if not client.waiting:
            client.served_tokens = max(client.served_tokens, self._level())
            self._offer(client)
        client.waiting += 1
        self._waiting[sequence] = None
        heapq.heappush(client.heap, (sequence.sort_key, sequence))

    @property
    def first(self) -> Sequence:
        """The next sequence. There must be one."""
        heap = self._least_served().heap
        while heap[0][1] not in self._waiting:
            heapq.heappop(heap)
        return heap[0][1]

    def pop(self) -> Sequence:
        """Take out the next sequence, which runs from now on, and return it."""
        sequence = self.first
        heapq.heappop(self._client_of(sequence).heap)
        self._stop_waiting(sequence)
        return sequence

    def expire_first(self) -> None:
        """Take out the next sequence because it cannot be served in time; ``take_expired`` returns it."""
        sequence = self.pop()
        self._timed.discard(sequence)
        self._expired.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ends, whether it waits, runs or has expired."""
        self._timed.discard(sequence)
        if sequence in self._expired:
            self._expired.remove(sequence)
        if sequence in self._waiting:
            self._stop_waiting(sequence)

    def take_expired(self, now_ns: int) -> list[Sequence]:
        """Return, once, the sequences that cannot be served in time, or whose deadline is not after ``now_ns``."""
        expired, self._expired = self._expired, []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence in self._timed:
                expired.append(sequence)
        return expired

    def seconds_to_deadline(self, now_ns: int) -> float:
        """Return the seconds to the next deadline; infinity: there is none."""
        return max(0.0, (self._deadlines[0][0] - now_ns) / 1e9) if self._deadlines else math.inf

    def charge(self, client_id: str, tokens: int) -> None:
        """Count so many tokens as computed for a client; where clients do not take turns, that says nothing."""
        if self._fair:
            self._client(client_id).served_tokens += tokens

    def _stop_waiting(self, sequence: Sequence) -> None:
        del self._waiting[sequence]
        client = self._client_of(sequence)
        client.waiting -= 1
        if not client.waiting:
            client.heap.clear()
            self._last = client
        elif len(client.heap) > 2 * client.waiting + 64:
            client.heap = [entry for entry in client.heap if entry[1] in self._waiting]
            heapq.heapify(client.heap)

    def _client_of(self, sequence: Sequence) -> _Client:
        return self._client(sequence.request.client_id if self._fair else "")

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            if len(self._clients) >= REMEMBERED_CLIENTS + len(self._waiting):
                self._clients = {known: one for known, one in self._clients.items() if one.waiting}
            client = self._clients[name] = _Client(self._level())
        return client

    def _offer(self, client: _Client) -> None:
        if not client.offered:
            client.offered = True
            self._turns += 1
            heapq.heappush(self._offers, (client.served_tokens, self._turns, client))

    def _level(self) -> int:
        """Return where a client begins: at the least served that waits, or the last that did."""
        return self._least_served().served_tokens if self._waiting else self._last.served_tokens

    def _least_served(self) -> _Client:
        while True:
            served, turn, client = self._offers[0]
            if not client.waiting:
                heapq.heappop(self._offers)
                client.offered = False
            elif served < client.served_tokens:
                heapq.heapreplace(self._offers, (client.served_tokens, turn, client))
            else:
                return client
