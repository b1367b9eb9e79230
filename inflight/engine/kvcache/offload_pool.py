"""The memory for offloaded blocks: slots of one block each, in the host's memory or in a file that is mapped into it.

The file has no name: it is created without one, or loses it at once, so that nothing of it stays behind however the
process ends, and nothing that an earlier process wrote is ever read. Its space is reserved on the disk at the start.
Even so it can be cut short, and its disk can fail; to touch a mapped page then ends the process (SIGBUS). So the kernel
is asked to fetch pages before they are touched: that fails with an error. A pool that has failed once is off for good.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from inflight.engine.kvcache.blocks import BlockCopy
from inflight.engine.kvcache.offload_transfer import SLOTS_AT_ONCE, OffloadTransfer
from inflight.engine.kvcache.pool import KvPool
from inflight.engine.transfer import to_device
from inflight.errors import DeploymentError

log = logging.getLogger(__name__)

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Advice of ``madvise(2)``, Linux 5.14 and later; an older kernel says EINVAL and is trusted with its files' sizes."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_DECAY = 0.9
"""What earlier measurements are multiplied by with each new one: some ten of them count."""
_FORGETTING = 0.99
"""What the measured time of restoring is multiplied by with each verdict against it."""


class OffloadPoolLost(Exception):
    """What a step was to restore is lost; the step's sequences must be computed again."""


class HostMemory:
    """Slots in the host's memory."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.memory = torch.empty((slots, slot_bytes), dtype=torch.uint8)
        """``[slots, slot_bytes]``, as in ``MappedFile``."""

    def pin(self) -> bool:
        """Have CUDA pin the memory in place, until it is freed; return whether that succeeded.

        PyTorch's own way rounds up to a power of two, which here may be tens of gigabytes.
        """
        address, size = self.memory.data_ptr(), self.memory.nbytes
        try:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, 0)))
        except RuntimeError as error:
            log.warning("the second tier's %d bytes cannot be pinned, and are copied once more: %s", size, error)
            return False
        weakref.finalize(self, _unpin, address).atexit = False
        return True

    def fault(self, slots: Sequence[int] = (), write: bool = False) -> str | None:
        """Return what is wrong with the memory: nothing."""
        return None


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # what is on its way
    torch.cuda.cudart().cudaHostUnregister(address)


class MappedFile:
    """Slots in a mapped file without a name."""

    def __init__(self, directory: Path | None, slots: int, slot_bytes: int) -> None:
        """``directory``: where the file is; None: where temporary files are.

        Raises:
            DeploymentError: the file cannot be made, or the disk has no room for it.
        """
        self._size = slots * slot_bytes
        try:
            self._file: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
            os.posix_fallocate(self._file.fileno(), 0, self._size)
            self._mapped = mmap.mmap(self._file.fileno(), self._size)
        except OSError as error:
            where = directory or tempfile.gettempdir()
            raise DeploymentError(
                f"kv_cache.offload: no file of {self._size} bytes in {where}: {error.strerror}"
            ) from None
        self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8).view(slots, slot_bytes)

    def pin(self) -> bool:
        """Return that the memory is not pinned: a file's pages come and go."""
        return False

    def fault(self, slots: Sequence[int] = (), write: bool = False) -> str | None:
        """Return what is wrong with the file, or None. To touch what it no longer has would end the process.

        ``slots`` are about to be touched; ``write``: they are to be written.
        """
        size = os.fstat(self._file.fileno()).st_size
        if size < self._size:
            return f"the file has {size} bytes of {self._size}"
        advice, slot_bytes = _POPULATE_WRITE if write else _POPULATE_READ, self._size // len(self.memory)
        for slot in slots:
            begin, end = slot * slot_bytes // mmap.PAGESIZE * mmap.PAGESIZE, (slot + 1) * slot_bytes
            address, length = ctypes.c_void_p(self.memory.data_ptr() + begin), ctypes.c_size_t(end - begin)
            # Python's own madvise keeps all threads waiting for the disk.
            if _LIBC.madvise(address, length, advice) and ctypes.get_errno() != errno.EINVAL:
                reason = os.strerror(ctypes.get_errno())
                return f"the kernel cannot {'write' if write else 'read'} the file: {reason}"
        return None


class RestoreRule:
    """Restoring pays where it takes less time than computing, as measured lately; or from a set length on."""

    def __init__(self, min_tokens: int | None) -> None:
        """``min_tokens``: restore prefixes of so many tokens or more; None: decide by measurement."""
        self._min_tokens = min_tokens
        self._compute, self._restore = np.zeros(2), np.zeros(2)  # tokens and seconds

    def computed(self, tokens: int, seconds: float) -> None:
        """Count a measurement: computing so many tokens of prompts took so many seconds."""
        self._compute = self._compute * _DECAY + (tokens, seconds)

    def restored(self, tokens: int, seconds: float) -> None:
        """Count a measurement: restoring so many tokens took so many seconds."""
        self._restore = self._restore * _DECAY + (tokens, seconds)

    def pays(self, tokens: int) -> bool:
        """Return whether to restore so many tokens; until both have been measured it is so, to measure restoring.

        A verdict against restoring wears off, since it keeps restoring from being measured again.
        """
        if self._min_tokens is not None:
            return tokens >= self._min_tokens
        (computed, computing_s), (restored, restoring_s) = self._compute, self._restore
        if not computed or not restored or restoring_s / restored < computing_s / computed:
            return True
        self._restore *= 1, _FORGETTING
        return False


class OffloadPool:
    """Copies blocks within the cache, and between the cache and the offload slots."""

    def __init__(self, kv_pool: KvPool, num_blocks: int, storage: HostMemory | MappedFile, rule: RestoreRule) -> None:
        """Slots of ``storage`` are numbered on from ``num_blocks``."""
        self._kv_pool, self._first, self._storage, self.rule = kv_pool, num_blocks, storage, rule
        self._parts = [part.view(torch.uint8).unflatten(2, (num_blocks, -1)).flatten(3) for part in kv_pool.parts]
        """Views ``[layers, kv_heads, blocks, bytes]``."""
        self._sizes = [part[:, :, 0].numel() for part in self._parts]
        """Bytes of a block in each of them."""
        device = kv_pool.keys.device
        self._copies: OffloadTransfer | None = None
        """Copies asynchronously on a GPU; None: there is no GPU."""
        if device.type == "cuda":
            self._copies = OffloadTransfer(self._storage.memory, device, not self._storage.pin(), self.usable)
        self._tokens_per_block = kv_pool.keys.shape[2] // num_blocks
        self._lost = False

    @property
    def num_slots(self) -> int:
        """How many blocks it holds; 0 once it is lost."""
        return 0 if self._lost else len(self._storage.memory)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the host's memory that are pinned for it."""
        return self._copies.pinned_bytes if self._copies else 0

    def usable(self, slots: Sequence[int] = (), write: bool = False) -> bool:
        """Whether it still holds what was put there; a fault is logged once. Arguments are those of ``fault``."""
        fault = None if self._lost else self._storage.fault(slots, write)
        if fault is not None:
            self._lost = True
            log.error("the KV cache's second tier is off: %s; what it held is computed again", fault)
        return not self._lost

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make copies in their order. What a lost pool cannot take is dropped: ``OffloadedBlocks.poll`` forgets it.

        Raises:
            OffloadPoolLost: the pool cannot give back what it holds.
        """
        if self._copies is not None:
            self._copies.settle()
            for slots, seconds in self._copies.take_times():
                self.rule.restored(slots * self._tokens_per_block, seconds)
        first = self._first
        for (source_here, target_here), group in groupby(copies, lambda one: (one.source < first, one.target < first)):
            batch = list(group)
            if source_here and target_here:
                self._kv_pool.copy(batch)
            elif source_here:
                self._save(batch)
            else:
                self._load(batch)

    def _save(self, copies: list[BlockCopy]) -> None:
        latest = {copy.target: copy.source for copy in copies}  # a slot may be freed and taken again in one step
        for blocks, slots in self._batches((block, slot) for slot, block in latest.items()):
            if self._copies is not None:
                self._copies.save(partial(self._gather, blocks), slots)
            elif self.usable(slots, write=True):
                rows = torch.empty((len(slots), self._storage.memory.shape[1]), dtype=torch.uint8)
                self._gather(blocks, rows)
                self._storage.memory.index_copy_(0, torch.tensor(slots), rows)

    def _load(self, copies: list[BlockCopy]) -> None:
        started = time.perf_counter()
        for blocks, slots in self._batches((copy.target, copy.source) for copy in copies):
            if self._copies is not None:
                there = self._copies.load(slots, partial(self._scatter, blocks))
            elif there := self.usable(slots):
                self._scatter(blocks, self._storage.memory[torch.tensor(slots)])
            if not there:
                raise OffloadPoolLost
        if self._copies is None:
            self.rule.restored(len(copies) * self._tokens_per_block, time.perf_counter() - started)

    def _gather(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy blocks into rows ``[blocks, slot_bytes]``."""
        rows.copy_(torch.cat([part[:, :, blocks].movedim(2, 0).flatten(1) for part in self._parts], 1))

    def _scatter(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy rows ``[blocks, slot_bytes]`` into blocks."""
        for part, own in zip(self._parts, rows.split(self._sizes, 1), strict=True):
            part[:, :, blocks] = own.unflatten(1, (*part.shape[:2], -1)).movedim(0, 2)

    def _batches(self, moves: Iterator[tuple[int, int]]) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield block ids, on the cache's device, and their slots, some at a time."""
        while batch := list(islice(moves, SLOTS_AT_ONCE)):
            blocks = to_device(np.array([block for block, _ in batch]), self._kv_pool.keys.device)
            yield blocks, [slot - self._first for _, slot in batch]
