"""Asynchronous copies between a GPU's blocks and the offload blocks, on a CUDA stream of their own.

To save blocks, the compute stream gathers them into a device buffer, so that the next step may overwrite them; the
transfer stream then copies the buffer to the host while that step runs. To load blocks, the transfer stream fills a
device buffer, and the compute stream waits for it and scatters it into blocks. Where the offload blocks are not pinned,
each buffer has a pinned part on the host, and the host itself copies between that part and the offload blocks.
"""

from __future__ import annotations

import time
from collections import abc, deque

import torch
from torch import Tensor

from inflight.engine.transfer import OwnStream

BLOCKS_AT_ONCE = 32
"""Blocks that a buffer holds."""
_BUFFERS = 2
"""Buffers for each direction: one is filled while the other one is emptied."""


class _Buffer:
    """Rows for some blocks on the device, and on the host if the offload blocks are not pinned."""

    def __init__(self, block_bytes: int, device: torch.device, staged: bool) -> None:
        shape = BLOCKS_AT_ONCE, block_bytes
        self.rows = torch.empty(shape, dtype=torch.uint8, device=device)
        self.host_rows = torch.empty(shape, dtype=torch.uint8, pin_memory=True) if staged else None
        self.rows_filled = torch.cuda.Event()
        """The device's rows may be read. In a load ``host_rows`` have been read then, and may be overwritten."""
        self.rows_emptied = torch.cuda.Event()
        """The device's rows may be overwritten. In a save ``host_rows`` have been written then, and may be read."""
        self.unwritten: list[int] = []
        """The offload blocks that ``host_rows`` hold and that the host has not written yet; only after a save."""


class OffloadTransfer:
    """Copies in both directions, in their order."""

    def __init__(
        self, memory: Tensor, device: torch.device, staged: bool,
        check_usable: abc.Callable[[abc.Sequence[int], bool], bool],
    ) -> None:  # fmt: skip
        """``memory``: the offload blocks ``[blocks, block_bytes]``; ``staged``: they are not pinned.

        ``check_usable`` returns whether the host may touch offload blocks; its second argument: whether it writes them.
        """
        self._memory, self._device, self._check_usable = memory, device, check_usable
        self._own = OwnStream(device)
        self._save_buffers, self._load_buffers = (
            deque(_Buffer(memory.shape[1], device, staged) for _ in range(_BUFFERS)) for _ in range(2)
        )
        self._measured: deque[tuple[int, float, torch.cuda.Event, torch.cuda.Event]] = deque()
        """Of each load: blocks, the host's seconds, and the events when the transfer stream began and ended it."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the host's memory that are pinned."""
        buffers = (*self._save_buffers, *self._load_buffers)
        return sum(one.host_rows.nbytes for one in buffers if one.host_rows is not None) or self._memory.nbytes

    def save(self, gather: abc.Callable[[Tensor], None], blocks: list[int]) -> None:
        """Begin to write offload blocks, at most ``BLOCKS_AT_ONCE``.

        ``gather`` copies their contents into rows ``[blocks, block_bytes]`` on the device.
        """
        buffer = _least_recent(self._save_buffers)
        self._write_out(buffer)
        transfer, compute = self._own.stream, torch.cuda.current_stream(self._device)
        rows = buffer.rows[: len(blocks)]
        compute.wait_event(buffer.rows_emptied)
        gather(rows)
        buffer.rows_filled.record(compute)
        transfer.wait_event(buffer.rows_filled)
        with torch.cuda.stream(transfer):
            if buffer.host_rows is not None:
                buffer.host_rows[: len(blocks)].copy_(rows, non_blocking=True)
                buffer.unwritten = blocks
            else:
                for row, block in enumerate(blocks):
                    self._memory[block].copy_(rows[row], non_blocking=True)
        buffer.rows_emptied.record(transfer)

    def load(self, blocks: list[int], scatter: abc.Callable[[Tensor], None]) -> bool:
        """Begin to read offload blocks, at most ``BLOCKS_AT_ONCE``; False: they cannot be read.

        ``scatter`` copies rows ``[blocks, block_bytes]`` on the device to where they belong.
        """
        started = time.perf_counter()
        if any(set(buffer.unwritten) & set(blocks) for buffer in self._save_buffers):
            self.settle(wait=True)
        if not self._check_usable(blocks, False):
            return False
        buffer = _least_recent(self._load_buffers)
        transfer, compute = self._own.stream, torch.cuda.current_stream(self._device)
        rows, begin, end = buffer.rows[: len(blocks)], *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        if buffer.host_rows is not None:
            buffer.rows_filled.synchronize()
            torch.index_select(self._memory, 0, torch.tensor(blocks), out=buffer.host_rows[: len(blocks)])
        host_seconds = time.perf_counter() - started
        transfer.wait_event(buffer.rows_emptied)
        begin.record(transfer)
        with torch.cuda.stream(transfer):
            if buffer.host_rows is not None:
                rows.copy_(buffer.host_rows[: len(blocks)], non_blocking=True)
            else:
                for row, block in enumerate(blocks):
                    rows[row].copy_(self._memory[block], non_blocking=True)
        end.record(transfer)
        buffer.rows_filled.record(transfer)
        compute.wait_event(buffer.rows_filled)
        scatter(rows)
        buffer.rows_emptied.record(compute)
        self._measured.append((len(blocks), host_seconds, begin, end))
        return True

    def settle(self, wait: bool = False) -> None:
        """Write the saves that have arrived on the host to the offload blocks; ``wait``: wait for all to arrive."""
        for buffer in list(self._save_buffers):  # the one that was filled first comes first
            if buffer.unwritten and not wait and not buffer.rows_emptied.query():
                return
            self._write_out(buffer)

    def take_times(self) -> list[tuple[int, float]]:
        """Return the loads that have ended since the last call: how many blocks, and the seconds that it took."""
        taken = []
        while self._measured and self._measured[0][3].query():
            blocks, seconds, begin, end = self._measured.popleft()
            taken.append((blocks, seconds + begin.elapsed_time(end) / 1e3))
        return taken

    def _write_out(self, buffer: _Buffer) -> None:
        """Write what ``buffer`` still holds on the host to the offload blocks."""
        blocks, buffer.unwritten = buffer.unwritten, []
        if blocks and self._check_usable(blocks, True):
            assert buffer.host_rows is not None
            buffer.rows_emptied.synchronize()
            self._memory.index_copy_(0, torch.tensor(blocks), buffer.host_rows[: len(blocks)])


def _least_recent(buffers: deque[_Buffer]) -> _Buffer:
    """Return the buffer whose last use is the longest ago, which is then the most recent one."""
    buffers.rotate(-1)
    return buffers[-1]
