"""Transfers between the host and the device: neither side waits before the data are needed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

_STREAMS = 32
"""How many streams PyTorch has for each device; it hands them out in turn."""


class OwnStream:
    """A CUDA stream that no other living ``OwnStream`` has."""

    _alive: ClassVar[weakref.WeakSet[OwnStream]] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        taken: set[torch.cuda.Stream] = {one.stream for one in self._alive}
        dealt = (torch.cuda.Stream(device) for _ in range(_STREAMS))
        self.stream: torch.cuda.Stream = next((one for one in dealt if one not in taken), torch.cuda.Stream(device))
        self._alive.add(self)


class TokenIds(NamedTuple):
    """A step's token ids, some of which the device may have sampled and the host does not know yet."""

    known: Sequence[int]
    """The packed tokens, with 0 in place of those that only the device knows."""
    chosen: Tensor | None = None
    """The tokens that only the device knows ``[n]``, on the device."""
    places: Sequence[int] = ()
    """The ``n`` indices in the packed tokens where those belong."""

    def on(self, device: torch.device) -> Tensor:
        """Return all token ids on the device, int64."""
        tokens = to_device(np.array(self.known, np.int64), device)
        if self.chosen is not None:
            tokens.index_copy_(0, to_device(np.array(self.places, np.int64), device), self.chosen)
        return tokens


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Return ``numbers`` on the device, without waiting for the transfer."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class ToHost:
    """Tensors on their way to the host; ``wait`` does not wait for what the device is given to do afterwards."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """``tensors``: at least one, all on one device."""
        device = tensors[0].device
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(device))

    def wait(self) -> list[np.ndarray]:
        """Wait for the tensors, and return them as arrays."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.numpy() for tensor in self._tensors]
