"""Between the host and the device: neither way waits until what was sent, or asked for, is needed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

_STREAMS = 32
"""As many streams PyTorch has for each device; it deals them out in turn."""


class OwnStream:
    """A CUDA stream that no other one of these that lives has: what it owns outlives nobody else's."""

    _alive: ClassVar[weakref.WeakSet[OwnStream]] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: a CUDA device.
        """
        taken: set[torch.cuda.Stream] = {one.stream for one in self._alive}
        dealt = (torch.cuda.Stream(device) for _ in range(_STREAMS))
        self.stream: torch.cuda.Stream = next((one for one in dealt if one not in taken), torch.cuda.Stream(device))
        self._alive.add(self)


class TokenIds(NamedTuple):
    """A step's token ids, of which the device may have chosen some that the host has not seen."""

    known: Sequence[int]
    """Packed; 0 in place of those."""
    chosen: Tensor | None = None
    """``[n]``, on the device."""
    places: Sequence[int] = ()
    """``n`` places in the packed tokens where those belong."""

    def on(self, device: torch.device) -> Tensor:
        """Return all of them on the device, int64."""
        tokens = to_device(np.array(self.known, np.int64), device)
        if self.chosen is not None:
            tokens.index_copy_(0, to_device(np.array(self.places, np.int64), device), self.chosen)
        return tokens


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Return ``numbers`` on the device; nothing waits for the transfer."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class ToHost:
    """Tensors on their way to the host. What the device is given to do afterwards is not waited for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """
        Args:
            tensors: of one device; at least one.
        """
        device = tensors[0].device
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(device))

    def wait(self) -> list[np.ndarray]:
        """Return them, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [tensor.numpy() for tensor in self._tensors]
