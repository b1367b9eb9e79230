"""The second tier's memory: pages of bytes in the host's memory or in a file that is mapped into it.

The file has no name: it is created without one, or loses it at once, so that nothing of it stays behind however the
process ends, and nothing that an earlier process wrote is ever read. Its space is reserved on the disk at the start.
Even so it can be cut short, and its disk can fail; to touch a mapped page then ends the process (SIGBUS). So the kernel
is asked to fetch pages before they are touched: that fails with an error. A tier that has failed once is off for good.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention.paged import KvTensors
from inflight.engine.kv.blocks import BlockCopy
from inflight.engine.kv.offload import RestoreRule
from inflight.engine.kv.page_copies import PAGES_AT_ONCE, PageCopies, pin
from inflight.engine.transfer import to_device
from inflight.errors import DeploymentError

log = logging.getLogger(__name__)

_POPULATE_READ, _POPULATE_WRITE = 22, 23
"""Advice of ``madvise(2)``, Linux 5.14 and later; an older kernel says EINVAL and is trusted with its files' sizes."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class TierLost(Exception):
    """What a step was to restore is gone: its sequences are to be computed again."""


class HostPages:
    """Pages in the host's memory."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.memory = torch.empty((pages, page_bytes), dtype=torch.uint8)

    def pin(self) -> bool:
        """Pin it for a GPU; return whether it is."""
        return pin(self, self.memory)

    def fault(self, pages: Sequence[int] = (), write: bool = False) -> str | None:
        """Return what is wrong with the memory: nothing."""
        return None


class FilePages:
    """Pages in a mapped file without a name."""

    def __init__(self, directory: Path | None, pages: int, page_bytes: int) -> None:
        """
        Args:
            directory: where it is; None: where temporary files are.
            pages: how many.
            page_bytes: of each.

        Raises:
            DeploymentError: the file cannot be made, or the disk has no room for it.
        """
        self._size = pages * page_bytes
        try:
            self._file: BinaryIO = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
            os.posix_fallocate(self._file.fileno(), 0, self._size)
            self._mapped = mmap.mmap(self._file.fileno(), self._size)
        except OSError as error:
            where = directory or tempfile.gettempdir()
            raise DeploymentError(
                f"kv_cache.offload: no file of {self._size} bytes in {where}: {error.strerror}"
            ) from None
        self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8).view(pages, page_bytes)

    def pin(self) -> bool:
        """Return that it is not pinned: a file's pages come and go."""
        return False

    def fault(self, pages: Sequence[int] = (), write: bool = False) -> str | None:
        """Return what is wrong with the file, or None. To touch what it has no longer would end the process.

        Args:
            pages: those about to be touched.
            write: whether they are to be written.
        """
        size = os.fstat(self._file.fileno()).st_size
        if size < self._size:
            return f"the file has {size} bytes of {self._size}"
        advice, page_bytes = _POPULATE_WRITE if write else _POPULATE_READ, self._size // len(self.memory)
        for page in pages:
            begin, end = page * page_bytes // mmap.PAGESIZE * mmap.PAGESIZE, (page + 1) * page_bytes
            failed = _advise(self.memory.data_ptr() + begin, end - begin, advice)
            if failed not in (0, errno.EINVAL):
                return f"the kernel cannot {'write' if write else 'read'} the file: {os.strerror(failed)}"
        return None


def _advise(address: int, size: int, advice: int) -> int:
    """Call ``madvise(2)``; return 0 or the error's number. Python's own keeps all threads waiting for the disk."""
    failed = _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)
    return ctypes.get_errno() if failed else 0


class KvTier:
    """Copies blocks within the cache, and between the cache and the second tier."""

    def __init__(
        self, tensors: KvTensors, num_blocks: int, make_pages: Callable[[int], HostPages | FilePages], rule: RestoreRule
    ) -> None:
        """
        Args:
            tensors: the cache's memory.
            num_blocks: its blocks.
            make_pages: makes the tier's memory, given the bytes of a page.
            rule: whether restoring pays.
        """
        self._tensors, self._first, self._rule = tensors, num_blocks, rule
        blocks = [part.view(torch.uint8).unflatten(2, (num_blocks, -1)).flatten(3) for part in tensors.parts]
        self._parts = blocks
        """Views ``[layers, kv_heads, blocks, bytes]``."""
        page_bytes = sum(part[:, :, 0].numel() for part in blocks)
        self._store = make_pages(page_bytes)
        device = tensors.keys.device
        self._copies: PageCopies | None = None
        """How a GPU copies; None: there is none."""
        if device.type == "cuda":
            self._copies = PageCopies(self._store.memory, device, not self._store.pin(), self.usable)
        self._tokens_per_block = tensors.keys.shape[2] // num_blocks
        self._lost = False

    @property
    def pages(self) -> int:
        """How many blocks it holds."""
        return 0 if self._lost else len(self._store.memory)

    @property
    def nbytes(self) -> int:
        """Its memory."""
        return self._store.memory.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Its memory that is pinned."""
        return self._copies.pinned_bytes if self._copies else 0

    def usable(self, pages: Sequence[int] = (), write: bool = False) -> bool:
        """Whether it still is what it was at the start; what is wrong with it is logged once.

        Args:
            pages: those about to be touched, which must be there.
            write: whether they are to be written.
        """
        fault = None if self._lost else self._store.fault(pages, write)
        if fault is not None:
            self._lost = True
            log.error("the KV cache's second tier is off: %s; what it held is computed again", fault)
        return not self._lost

    def pays(self, tokens: int) -> bool:
        """Whether to restore so many tokens rather than to compute them again."""
        return self._rule.pays(tokens)

    def computed(self, tokens: int, seconds: float) -> None:
        """Learn that a step computed so many tokens of prompts, and how long it took."""
        self._rule.computed(tokens, seconds)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make copies in their order. What the tier cannot take is dropped: it is forgotten before it is missed.

        Raises:
            TierLost: it cannot give back what it has.
        """
        if self._copies is not None:
            self._copies.settle()
            for pages, seconds in self._copies.take_times():
                self._rule.restored(pages * self._tokens_per_block, seconds)
        for (source_here, target_here), group in groupby(copies, key=self._sides):
            batch = list(group)
            if source_here and target_here:
                self._tensors.copy(batch)
            elif source_here:
                self._save(batch)
            else:
                self._load(batch)

    def _sides(self, copy: BlockCopy) -> tuple[bool, bool]:
        return copy.source < self._first, copy.target < self._first

    def _save(self, copies: list[BlockCopy]) -> None:
        latest = {copy.target: copy.source for copy in copies}  # a page may be given up and taken again in one step
        for blocks, pages in self._batches((block, page) for page, block in latest.items()):
            if self._copies is not None:
                self._copies.save(partial(self._gather, blocks), pages)
            elif self.usable(pages, write=True):
                rows = torch.empty((len(pages), self._store.memory.shape[1]), dtype=torch.uint8)
                self._gather(blocks, rows)
                self._store.memory.index_copy_(0, torch.tensor(pages), rows)

    def _load(self, copies: list[BlockCopy]) -> None:
        started = time.perf_counter()
        for blocks, pages in self._batches((copy.target, copy.source) for copy in copies):
            if self._copies is not None:
                there = self._copies.load(pages, partial(self._scatter, blocks))
            elif there := self.usable(pages):
                self._scatter(blocks, self._store.memory[torch.tensor(pages)])
            if not there:
                raise TierLost
        if self._copies is None:
            self._rule.restored(len(copies) * self._tokens_per_block, time.perf_counter() - started)

    def _gather(self, blocks: Tensor, rows: Tensor) -> None:
        """Put blocks into rows ``[blocks, page_bytes]``."""
        rows.copy_(torch.cat([part[:, :, blocks].movedim(2, 0).flatten(1) for part in self._parts], 1))

    def _scatter(self, blocks: Tensor, rows: Tensor) -> None:
        """Put rows ``[blocks, page_bytes]`` into blocks."""
        sizes = [part[:, :, 0].numel() for part in self._parts]
        for part, own in zip(self._parts, rows.split(sizes, 1), strict=True):
            part[:, :, blocks] = own.unflatten(1, (*part.shape[:2], -1)).movedim(0, 2)

    def _batches(self, moves: Iterator[tuple[int, int]]) -> Iterator[tuple[Tensor, list[int]]]:
        """Yield blocks, on their device, and their pages, some at a time."""
        while batch := list(islice(moves, PAGES_AT_ONCE)):
            blocks = to_device(np.array([block for block, _ in batch]), self._tensors.keys.device)
            yield blocks, [page - self._first for _, page in batch]
