"""Copies between a GPU's blocks and the second tier's pages, on a stream of their own: no step waits for the bus.

What leaves is gathered by the steps' stream into a buffer, so that its blocks may be written over by the next step, and
copied from there while that one runs. What comes back waits in a buffer until the steps' stream takes it. Events say
when a buffer may be used again; the host waits for one only where it must touch a buffer itself.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inflight.engine.transfer import OwnStream

log = logging.getLogger(__name__)

PAGES_AT_ONCE = 32
"""Pages that a buffer holds."""
_BUFFERS = 2
"""For each way: one is filled while the other one is emptied."""


def pin(owner: object, memory: Tensor) -> bool:
    """Have CUDA pin memory of the host as it is, until its owner goes; False: it cannot be pinned.

    PyTorch's own way rounds up to a power of two, which for a tier may be tens of gigabytes.
    """
    address = memory.data_ptr()
    try:
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)))
    except RuntimeError as error:
        log.warning("the second tier's %d bytes cannot be pinned, and are copied once more: %s", memory.nbytes, error)
        return False
    weakref.finalize(owner, _unpin, address).atexit = False
    return True


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # what is on its way
    torch.cuda.cudart().cudaHostUnregister(address)


class _Buffer:
    """Room for some pages on the device; and on the host, where pages are not pinned themselves."""

    def __init__(self, page_bytes: int, device: torch.device, staged: bool) -> None:
        shape = PAGES_AT_ONCE, page_bytes
        self.rows = torch.empty(shape, dtype=torch.uint8, device=device)
        self.host = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if staged else None
        self.full, self.free = torch.cuda.Event(), torch.cuda.Event()
        """When it has been filled, and emptied; on the device."""
        self.pages: list[int] = []
        """Those that ``host`` is to be written to."""


class PageCopies:
    """Copies both ways, in their order."""

    def __init__(
        self, memory: Tensor, device: torch.device, staged: bool, usable: Callable[[Sequence[int], bool], bool]
    ) -> None:
        """
        Args:
            memory: the tier's ``[pages, page_bytes]``.
            device: of the cache, a CUDA device.
            staged: whether the pages are not pinned.
            usable: whether pages may be touched, by the host; and whether to write them.
        """
        self._memory, self._device, self._usable = memory, device, usable
        self._own = OwnStream(device)
        self._leaving, self._coming = (
            deque(_Buffer(memory.shape[1], device, staged) for _ in range(_BUFFERS)) for _ in range(2)
        )
        self._measured: deque[tuple[int, float, torch.cuda.Event, torch.cuda.Event]] = deque()

    @property
    def pinned_bytes(self) -> int:
        """Memory of the host that is pinned."""
        buffers = [buffer.host for buffer in (*self._leaving, *self._coming) if buffer.host is not None]
        return sum(buffer.nbytes for buffer in buffers) or self._memory.nbytes

    def save(self, gather: Callable[[Tensor], None], pages: list[int]) -> None:
        """Have pages filled.

        Args:
            gather: puts what the pages get into rows ``[pages, page_bytes]`` of the device.
            pages: at most ``PAGES_AT_ONCE``.
        """
        buffer = self._next(self._leaving)
        self._write(buffer)
        stream, steps = self._own.stream, torch.cuda.current_stream(self._device)
        rows = buffer.rows[: len(pages)]
        steps.wait_event(buffer.free)
        gather(rows)
        buffer.full.record(steps)
        stream.wait_event(buffer.full)
        with torch.cuda.stream(stream):
            if buffer.host is not None:
                buffer.host[: len(pages)].copy_(rows, non_blocking=True)
                buffer.pages = pages
            else:
                for row, page in enumerate(pages):
                    self._memory[page].copy_(rows[row], non_blocking=True)
        buffer.free.record(stream)

    def load(self, pages: list[int], scatter: Callable[[Tensor], None]) -> bool:
        """Have pages read; False: they cannot be.

        Args:
            pages: at most ``PAGES_AT_ONCE``.
            scatter: takes rows ``[pages, page_bytes]`` of the device to where they belong.
        """
        started = time.perf_counter()
        if any(set(buffer.pages) & set(pages) for buffer in self._leaving):
            self.settle(wait=True)
        if not self._usable(pages, False):
            return False
        buffer = self._next(self._coming)
        stream, steps = self._own.stream, torch.cuda.current_stream(self._device)
        rows, begin, end = buffer.rows[: len(pages)], *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        if buffer.host is not None:
            buffer.full.synchronize()  # its last use: the device has read it
            torch.index_select(self._memory, 0, torch.tensor(pages), out=buffer.host[: len(pages)])
        seconds = time.perf_counter() - started
        stream.wait_event(buffer.free)
        begin.record(stream)
        with torch.cuda.stream(stream):
            if buffer.host is not None:
                rows.copy_(buffer.host[: len(pages)], non_blocking=True)
            else:
                for row, page in enumerate(pages):
                    rows[row].copy_(self._memory[page], non_blocking=True)
        end.record(stream)
        buffer.full.record(stream)
        steps.wait_event(buffer.full)
        scatter(rows)
        buffer.free.record(steps)
        self._measured.append((len(pages), seconds, begin, end))
        return True

    def settle(self, wait: bool = False) -> None:
        """Write to their pages what has arrived for those that are not pinned; or all of it, and ``wait`` for it."""
        for buffer in list(self._leaving):  # the one that was filled first comes first
            if buffer.pages and not wait and not buffer.free.query():
                return
            self._write(buffer)

    def take_times(self) -> list[tuple[int, float]]:
        """Return, once, what was read since: how many pages, and the seconds that it took."""
        taken = []
        while self._measured and self._measured[0][3].query():
            pages, seconds, begin, end = self._measured.popleft()
            taken.append((pages, seconds + begin.elapsed_time(end) / 1e3))
        return taken

    def _next(self, buffers: deque[_Buffer]) -> _Buffer:
        """Return the buffer whose last use is longest ago."""
        buffers.rotate(-1)
        return buffers[-1]

    def _write(self, buffer: _Buffer) -> None:
        pages, buffer.pages = buffer.pages, []
        if pages and self._usable(pages, True):
            assert buffer.host is not None
            buffer.free.synchronize()
            self._memory.index_copy_(0, torch.tensor(pages), buffer.host[: len(pages)])
