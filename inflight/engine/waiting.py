"""WaitingQueue: who waits, and who of them is next. It knows ranks and clients; not blocks, not budgets.

Without fairness the sequence of best rank is next. With it, the client that has been served least is next, with its
best-ranked sequence: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024,
arXiv:2401.00588), charged for each token when it is computed. A client that begins to wait is lifted to the least
served of those that wait, so that having been away earns nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from inflight.engine.sequence import Rank, Sequence

REMEMBERED_CLIENTS = 4096
"""Beyond so many, clients that do not wait are forgotten; when they come back they begin as new ones do."""


@dataclass(slots=True)
class _Client:
    served: int = 0
    """Virtual tokens: those computed for it, and what it was lifted by."""
    waiting: int = 0
    offered: bool = False
    """Whether it has an entry in the heap of clients."""
    heap: list[tuple[Rank, Sequence]] = field(default_factory=list)
    """Its sequences by rank; those that have left stay until they come up."""


class WaitingQueue:
    """Sequences that wait. Each operation takes time logarithmic in their number, removals amortized."""

    def __init__(self, fair: bool) -> None:
        """
        Args:
            fair: whether clients take turns; else all are one.
        """
        self._fair = fair
        self._waiting: dict[Sequence, None] = {}
        self._clients: dict[str, _Client] = {}
        self._offers: list[tuple[int, int, _Client]] = []
        """Heap of (served, turn, client) with one entry per client that waits; ``served`` may lag behind."""
        self._turns = 0
        self._last = _Client()
        """The client that was the last to stop waiting."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait, in no particular order."""
        return iter(self._waiting)

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether it waits."""
        return sequence in self._waiting

    def push(self, sequence: Sequence) -> None:
        """Add a sequence; its ``rank`` stays as it is while it waits."""
        client = self._client_of(sequence)
        if not client.waiting:
            client.served = max(client.served, self._level())
            self._offer(client)
        client.waiting += 1
        self._waiting[sequence] = None
        heapq.heappush(client.heap, (sequence.rank, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out, if it waits."""
        if sequence not in self._waiting:
            return
        del self._waiting[sequence]
        client = self._client_of(sequence)
        client.waiting -= 1
        if not client.waiting:
            client.heap.clear()
            self._last = client
        elif len(client.heap) > 2 * client.waiting + 64:
            client.heap = [entry for entry in client.heap if entry[1] in self._waiting]
            heapq.heapify(client.heap)

    @property
    def first(self) -> Sequence:
        """Who is next. There must be one."""
        heap = self._least_served().heap
        while heap[0][1] not in self._waiting:
            heapq.heappop(heap)
        return heap[0][1]

    def pop(self) -> Sequence:
        """Take out who is next, and return it."""
        sequence = self.first
        heapq.heappop(self._client_of(sequence).heap)
        self.discard(sequence)
        return sequence

    def charge(self, client_id: str, tokens: int) -> None:
        """Count so many tokens as computed for a client."""
        self._client(client_id).served += tokens

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
            heapq.heappush(self._offers, (client.served, self._turns, client))

    def _level(self) -> int:
        """Return where a client begins: at the least served that waits, or the last that did."""
        return self._least_served().served if self._waiting else self._last.served

    def _least_served(self) -> _Client:
        while True:
            served, turn, client = self._offers[0]
            if not client.waiting:
                heapq.heappop(self._offers)
                client.offered = False
            elif served < client.served:
                heapq.heapreplace(self._offers, (client.served, turn, client))
            else:
                return client
