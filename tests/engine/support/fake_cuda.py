"""``torch.cuda`` on a machine without a GPU: a device that computes on the CPU and holds programs to CUDA's rules."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.support.fake_streams import Capture, Cuda, Device, Event, Graph, Memory, Misuse, Mode, Stream


class _Cudart:
    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        cuda = Cuda.now()
        if address in cuda._pinned:
            return 712  # it is registered already
        memory = torch.empty(0)  # its address says which
        cuda._pinned[address] = memory, Memory()
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if Cuda.now()._pinned.pop(address, None) else 713


@contextlib.contextmanager
def _on(stream: Stream) -> Iterator[None]:
    cuda = Cuda.now()
    before, cuda.stream = cuda.stream, stream
    try:
        yield
    finally:
        cuda.stream = before


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")


@contextlib.contextmanager
def fake_cuda(seed: int = 0) -> Iterator[Cuda]:
    """Put the device in the place of ``torch.cuda``; it has no Triton, and the capability 7.5."""
    cuda = Cuda(seed)
    numpy, to = torch.Tensor.numpy, torch.Tensor.to

    def converted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device, dtype, queued, _ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        if device is None or device.type != "cuda":
            return to(tensor, *args, **kwargs)
        return cuda.to_device(tensor if dtype is None else to(tensor, dtype), queued)

    def as_array(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> np.ndarray:
        if isinstance(tensor, Device):
            raise Misuse("the host reads memory of the device")
        cuda.touch(tensor, False)
        return numpy(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "is_available": lambda: True, "_lazy_init": lambda: None, "get_device_capability": lambda *_: (7, 5),
            "Stream": Stream, "Event": Event,
            "CUDAGraph": Graph, "graph": Capture, "graph_pool_handle": lambda: (0, 1), "stream": _on,
            "current_stream": lambda *_: cuda.stream, "synchronize": cuda.synchronize,
            "device": lambda *_: contextlib.nullcontext(), "memory_reserved": lambda *_: 0, "cudart": _Cudart,
            "check_error": _check, "mem_get_info": lambda *_: (1 << 30, 1 << 31),
        }.items():  # fmt: skip
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.Tensor, "numpy", as_array)
        patch.setattr(torch.Tensor, "to", converted)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: cuda.pin(tensor.clone()))
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: cuda._memory(tensor) is not None)
        patch.setattr(Cuda, "_now", cuda)
        patch.setattr(Capture, "shared", None)
        # Wrapped tensors cannot be views in inference mode.
        patch.setattr(torch.inference_mode, "__enter__", lambda _: None)
        patch.setattr(torch.inference_mode, "__exit__", lambda *_: None)
        gc.freeze()  # captures collect garbage, and need not look at all that was imported
        try:
            with torch.no_grad(), Mode():
                yield cuda
            gc.collect()
        finally:
            gc.unfreeze()
