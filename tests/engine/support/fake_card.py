"""A card's memory on a CPU: it counts the bytes of every tensor that lives, and has no more than it has."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class FakeCard(TorchDispatchMode):
    """While it is entered, PyTorch computes in its memory; what one operation takes within itself does not count."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total, self.used, self._most = total, 0, 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor) and one.device.type != "meta" and one.layout is torch.strided:
                self._hold(one.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known[storage] = None
        self.used += storage.nbytes()
        weakref.finalize(storage, self._release, storage.nbytes())
        self._most = max(self._most, self.used)
        if self.used > self.total:
            raise torch.OutOfMemoryError(f"CUDA out of memory. {self.used} bytes are wanted of {self.total}")

    def _release(self, nbytes: int) -> None:
        self.used -= nbytes

    def free(self) -> int:
        """See ``DeviceMemory``."""
        return self.total - self.used

    def peak_of(self, compute: Callable[[], object]) -> int:
        """See ``DeviceMemory``."""
        before = self._most = self.used
        compute()
        return self._most - before
