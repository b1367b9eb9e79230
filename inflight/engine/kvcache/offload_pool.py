"""The memory of the offload blocks, in the host's memory or in a file that is mapped into it.

The file has no name: it is created without one, or loses it at once, so that nothing of it stays behind however the
process ends, and nothing that an earlier process wrote is ever read. Its space is reserved on the disk at the start.
Even so the file can be cut short, and its disk can fail; touching a mapped page then ends the process (SIGBUS). So the
kernel is asked to fetch pages before they are touched, which fails with an error instead. A pool that has failed once
is off for good.
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
from collections import abc
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from inflight.engine.kvcache.blocks import BlockCopy
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.kvcache.offload_transfer import BLOCKS_AT_ONCE, OffloadTransfer
from inflight.engine.transfer import to_device
from inflight.errors import DeploymentError

log = logging.getLogger(__name__)

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Advice of ``madvise(2)``, Linux 5.14 and later; an older kernel says EINVAL and is trusted with its files' sizes."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_DECAY = 0.9
"""Each new measurement multiplies the weight of the earlier ones by it, so that about ten of them count."""
_FORGETTING = 0.99
"""Each decision against restoring multiplies the measured time of restoring by it."""


class OffloadPoolLost(Exception):
    """What a step was to restore is lost; the step's sequences must be computed again."""


class HostMemory:
    """Offload blocks in the host's memory."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.memory = torch.empty((blocks, block_bytes), dtype=torch.uint8)
        """``[blocks, block_bytes]``, as in ``MappedFile``."""

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

    def fault(self, blocks: abc.Sequence[int] = (), write: bool = False) -> str | None:
        """Return what is wrong with the memory: nothing."""
        return None


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # copies may still read or write the memory
    torch.cuda.cudart().cudaHostUnregister(address)


class MappedFile:
    """Offload blocks in a mapped file without a name."""

    def __init__(self, directory: Path | None, blocks: int, block_bytes: int) -> None:
        """``directory``: where the file is; None: where temporary files are.

        Raises:
            DeploymentError: the file cannot be made, or the disk has no room for it.
        """
        self._size = blocks * block_bytes
        try:
            self._file: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
            os.posix_fallocate(self._file.fileno(), 0, self._size)
            self._mapped = mmap.mmap(self._file.fileno(), self._size)
        except (OSError, OverflowError) as error:
            where, why = directory or tempfile.gettempdir(), getattr(error, "strerror", None) or error
            raise DeploymentError(f"kv_cache.offload: no file of {self._size} bytes in {where}: {why}") from None
        self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8).view(blocks, block_bytes)

    def pin(self) -> bool:
        """Return that the memory is not pinned: a file's pages come and go."""
        return False

    def fault(self, blocks: abc.Sequence[int] = (), write: bool = False) -> str | None:
        """Return what is wrong with the file, or None. Touching pages that it no longer has would end the process.

        ``blocks`` are about to be touched; ``write``: they are to be written.
        """
        size = os.fstat(self._file.fileno()).st_size
        if size < self._size:
            return f"the file has {size} bytes of {self._size}"
        advice, block_bytes = _POPULATE_WRITE if write else _POPULATE_READ, self._size // len(self.memory)
        for block in blocks:
            begin, end = block * block_bytes // mmap.PAGESIZE * mmap.PAGESIZE, (block + 1) * block_bytes
            address, length = ctypes.c_void_p(self.memory.data_ptr() + begin), ctypes.c_size_t(end - begin)
            # Python's own madvise holds the GIL while it waits for the disk.
            if _LIBC.madvise(address, length, advice) and ctypes.get_errno() != errno.EINVAL:
                reason = os.strerror(ctypes.get_errno())
                return f"the kernel cannot {'write' if write else 'read'} the file: {reason}"
        return None


class RestoreRule:
    """Decides whether to restore a prefix or to compute it, by the measured times of both or by the prefix's length."""

    def __init__(self, min_tokens: int | None) -> None:
        """``min_tokens``: restore prefixes of so many tokens or more; None: decide by measurement."""
        self._min_tokens = min_tokens
        self._compute, self._restore = np.zeros(2), np.zeros(2)  # tokens and seconds

    def observe_compute(self, tokens: int, seconds: float) -> None:
        """Learn that computing so many tokens of prompts took so many seconds."""
        self._compute = self._compute * _DECAY + (tokens, seconds)

    def observe_restore(self, tokens: int, seconds: float) -> None:
        """Learn that restoring so many tokens took so many seconds."""
        self._restore = self._restore * _DECAY + (tokens, seconds)

    def decide(self, tokens: int) -> bool:
        """Return whether to restore so many tokens; until both times are measured they are, to measure restoring.

        Each decision against restoring lowers its measured time a little: otherwise it would never be measured again.
        """
        if self._min_tokens is not None:
            return tokens >= self._min_tokens
        (computed, computing_s), (restored, restoring_s) = self._compute, self._restore
        if not computed or not restored or restoring_s / restored < computing_s / computed:
            return True
        self._restore *= 1, _FORGETTING
        return False


class OffloadPool:
    """Copies blocks on the device, and between the device and the offload blocks."""

    def __init__(self, kv_pool: KvPool, num_blocks: int, storage: HostMemory | MappedFile, rule: RestoreRule) -> None:
        """The ids of the blocks of ``storage`` begin at ``num_blocks``."""
        self._kv_pool, self._first, self._storage, self.rule = kv_pool, num_blocks, storage, rule
        self._parts = [part.view(torch.uint8).unflatten(2, (num_blocks, -1)).flatten(3) for part in kv_pool.parts]
        """Views ``[layers, kv_heads, blocks, bytes]``."""
        self._sizes = [part[:, :, 0].numel() for part in self._parts]
        """Bytes of a block in each of them."""
        device = kv_pool.device
        self._transfer: OffloadTransfer | None = None
        """Copies to and from a GPU asynchronously; None: there is no GPU."""
        if device.type == "cuda":
            self._transfer = OffloadTransfer(self._storage.memory, device, not self._storage.pin(), self.check_usable)
        self._tokens_per_block = kv_pool.slots // num_blocks
        self._lost = False

    @property
    def capacity(self) -> int:
        """How many offload blocks there are; 0 once the pool is lost."""
        return 0 if self._lost else len(self._storage.memory)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the host's memory that are pinned for it."""
        return self._transfer.pinned_bytes if self._transfer else 0

    def check_usable(self, blocks: abc.Sequence[int] = (), write: bool = False) -> bool:
        """Return whether the storage works; the first ``fault``, which has the same arguments, turns the pool off."""
        fault = None if self._lost else self._storage.fault(blocks, write)
        if fault is not None:
            self._lost = True
            log.error("the KV cache's second tier is off: %s; what it held is computed again", fault)
        return not self._lost

    def copy(self, copies: abc.Sequence[BlockCopy]) -> None:
        """Make copies in their order. A lost pool drops what it is to save; ``OffloadedBlocks`` forgets that later.

        Raises:
            OffloadPoolLost: offload blocks that are to be restored cannot be read.
        """
        if self._transfer is not None:
            self._transfer.settle()
            for blocks, seconds in self._transfer.take_times():
                self.rule.observe_restore(blocks * self._tokens_per_block, seconds)
        first = self._first
        for (from_device, onto_device), group in groupby(copies, lambda one: (one.source < first, one.target < first)):
            batch = list(group)
            if from_device and onto_device:
                self._kv_pool.copy(batch)
            elif from_device:
                self._save(batch)
            else:
                self._load(batch)

    def _save(self, copies: list[BlockCopy]) -> None:
        # An offload block may be freed and taken again in one step: only the last copy to it counts.
        latest = {copy.target: copy.source for copy in copies}
        for blocks, offload_blocks in self._batches((source, target) for target, source in latest.items()):
            if self._transfer is not None:
                self._transfer.save(partial(self._gather, blocks), offload_blocks)
            elif self.check_usable(offload_blocks, write=True):
                rows = torch.empty((len(offload_blocks), self._storage.memory.shape[1]), dtype=torch.uint8)
                self._gather(blocks, rows)
                self._storage.memory.index_copy_(0, torch.tensor(offload_blocks), rows)

    def _load(self, copies: list[BlockCopy]) -> None:
        started = time.perf_counter()
        for blocks, offload_blocks in self._batches((copy.target, copy.source) for copy in copies):
            if self._transfer is not None:
                loaded = self._transfer.load(offload_blocks, partial(self._scatter, blocks))
            elif loaded := self.check_usable(offload_blocks):
                self._scatter(blocks, self._storage.memory[torch.tensor(offload_blocks)])
            if not loaded:
                raise OffloadPoolLost
        if self._transfer is None:
            self.rule.observe_restore(len(copies) * self._tokens_per_block, time.perf_counter() - started)

    def _gather(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy blocks into rows ``[blocks, block_bytes]``."""
        rows.copy_(torch.cat([part[:, :, blocks].movedim(2, 0).flatten(1) for part in self._parts], 1))

    def _scatter(self, blocks: Tensor, rows: Tensor) -> None:
        """Copy rows ``[blocks, block_bytes]`` into blocks."""
        for part, own in zip(self._parts, rows.split(self._sizes, 1), strict=True):
            part[:, :, blocks] = own.unflatten(1, (*part.shape[:2], -1)).movedim(0, 2)

    def _batches(self, pairs: abc.Iterator[tuple[int, int]]) -> abc.Iterator[tuple[Tensor, list[int]]]:
        """Yield some pairs at a time: block ids as a tensor on the device, and the indices of their offload blocks."""
        while batch := list(islice(pairs, BLOCKS_AT_ONCE)):
            blocks = to_device(np.array([block for block, _ in batch]), self._kv_pool.device)
            yield blocks, [offload_block - self._first for _, offload_block in batch]
