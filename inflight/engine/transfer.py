"""Between the host and the device: neither way waits until what was sent, or asked for, is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


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
