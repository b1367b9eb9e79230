"""Copies between a GPU's blocks and the offload slots, on a stream of their own: no step waits for the bus.

The steps' stream gathers blocks that leave into a buffer, so that the next step may write over them, and the transfer's
stream copies the buffer while that step runs. What comes back waits in a buffer until the steps' stream takes it.
Events say when a buffer may be used again; the host waits for one only where it must touch a buffer itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inflight.engine.transfer import OwnStream

SLOTS_AT_ONCE = 32
"""Slots that a buffer holds."""
_BUFFERS = 2
"""Buffers for each direction: one is filled while the other one is emptied."""


class _Buffer:
    """Memory for some slots on the device; and on the host, where the slots are not pinned themselves."""

    def __init__(self, slot_bytes: int, device: torch.device, staged: bool) -> None:
        shape = SLOTS_AT_ONCE, slot_bytes
        self.rows = torch.empty(shape, dtype=torch.uint8, device=device)
        self.host = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if staged else None
        self.full, self.free = torch.cuda.Event(), torch.cuda.Event()
        """When it has been filled, and when it has been emptied, by the device."""
        self.slots: list[int] = []
        """The slots that ``host`` is to be written to."""


class OffloadTransfer:
    """Copies in both directions, in their order."""

    def __init__(
        self, memory: Tensor, device: torch.device, staged: bool, usable: Callable[[Sequence[int], bool], bool]
    ) -> None:
        """``memory``: the slots ``[slots, slot_bytes]``; ``staged``: they are not pinned, but buffers on the host are.

        ``usable`` returns whether the host may touch slots; its second argument: whether it is to write them.
        """
        self._memory, self._device, self._usable = memory, device, usable
        self._own = OwnStream(device)
        self._leaving, self._coming = (
            deque(_Buffer(memory.shape[1], device, staged) for _ in range(_BUFFERS)) for _ in range(2)
        )
        self._measured: deque[tuple[int, float, torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the host's memory that are pinned."""
        buffers = [buffer.host for buffer in (*self._leaving, *self._coming) if buffer.host is not None]
        return sum(buffer.nbytes for buffer in buffers) or self._memory.nbytes

    def save(self, gather: Callable[[Tensor], None], slots: list[int]) -> None:
        """Begin to fill slots, at most ``SLOTS_AT_ONCE``.

        ``gather`` copies what they get into rows ``[slots, slot_bytes]`` on the device.
        """
        self._leaving.rotate(-1)
        buffer = self._leaving[-1]  # whose last use is the longest ago
        self._write(buffer)
        stream, steps = self._own.stream, torch.cuda.current_stream(self._device)
        rows = buffer.rows[: len(slots)]
        steps.wait_event(buffer.free)
        gather(rows)
        buffer.full.record(steps)
        stream.wait_event(buffer.full)
        with torch.cuda.stream(stream):
            if buffer.host is not None:
                buffer.host[: len(slots)].copy_(rows, non_blocking=True)
                buffer.slots = slots
            else:
                for row, slot in enumerate(slots):
                    self._memory[slot].copy_(rows[row], non_blocking=True)
        buffer.free.record(stream)

    def load(self, slots: list[int], scatter: Callable[[Tensor], None]) -> bool:
        """Begin to read slots, at most ``SLOTS_AT_ONCE``; False: they cannot be read.

        ``scatter`` copies rows ``[slots, slot_bytes]`` on the device to where they belong.
        """
        started = time.perf_counter()
        if any(set(buffer.slots) & set(slots) for buffer in self._leaving):
            self.settle(wait=True)
        if not self._usable(slots, False):
            return False
        self._coming.rotate(-1)
        buffer = self._coming[-1]
        stream, steps = self._own.stream, torch.cuda.current_stream(self._device)
        rows, begin, end = buffer.rows[: len(slots)], *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        if buffer.host is not None:
            buffer.full.synchronize()  # its last use: the device has read it
            torch.index_select(self._memory, 0, torch.tensor(slots), out=buffer.host[: len(slots)])
        seconds = time.perf_counter() - started
        stream.wait_event(buffer.free)
        begin.record(stream)
        with torch.cuda.stream(stream):
            if buffer.host is not None:
                rows.copy_(buffer.host[: len(slots)], non_blocking=True)
            else:
                for row, slot in enumerate(slots):
                    rows[row].copy_(self._memory[slot], non_blocking=True)
        end.record(stream)
        buffer.full.record(stream)
        steps.wait_event(buffer.full)
        scatter(rows)
        buffer.free.record(steps)
        self._measured.append((len(slots), seconds, begin, end))
        return True

    def settle(self, wait: bool = False) -> None:
        """Write what has arrived on the host to slots that are not pinned; ``wait``: until all has arrived."""
        for buffer in list(self._leaving):  # the one that was filled first comes first
            if buffer.slots and not wait and not buffer.free.query():
                return
            self._write(buffer)

    def take_times(self) -> list[tuple[int, float]]:
        """Return the reads that have ended since the last call: how many slots, and the seconds that it took."""
        taken = []
        while self._measured and self._measured[0][3].query():
            slots, seconds, begin, end = self._measured.popleft()
            taken.append((slots, seconds + begin.elapsed_time(end) / 1e3))
        return taken

    def _write(self, buffer: _Buffer) -> None:
        slots, buffer.slots = buffer.slots, []
        if slots and self._usable(slots, True):
            assert buffer.host is not None
            buffer.free.synchronize()
            self._memory.index_copy_(0, torch.tensor(slots), buffer.host[: len(slots)])
