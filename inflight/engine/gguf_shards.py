"""The weights of a GGUF model, as the files of a checkpoint hold them: ``shards.Shards`` of a GGUF file."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from inflight.engine.quant.gguf_blocks import MXFP4, decode, mxfp4_parts
from inflight.errors import DeploymentError
from inflight.gguf.checkpoint import in_blocks, open_gguf, require_types
from inflight.gguf.files import is_gguf
from inflight.gguf.names import Source
from inflight.gguf.types import FLOATS

log = logging.getLogger(__name__)

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_THREADS = min(8, len(os.sched_getaffinity(0)))


class GgufShards:
    """The tensors of a model in a GGUF file, by their names in a checkpoint."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            DeploymentError: a file is missing or not what it should be, or a tensor is of a type that is not decoded.
        """
        self.path, self._checkpoint = path, open_gguf(path)  # held, so that others need not read it again
        require_types(self._checkpoint.model)
        self._tensors = self._checkpoint.tensors
        scales = [f"{name}_scale" for name, source in self._tensors.items() if _has_scales(name, source)]
        self.names = frozenset(self._tensors) | set(scales)

    def load(self, names: Collection[str], take: Callable[[str, Tensor], None]) -> None:
        """Call ``take`` with each of the tensors ``names``, in several threads at once.

        Raises:
            DeploymentError: what ``take`` raises, of the first tensor that it does for.
        """
        log.info("loading %s", self.path.name)
        wanted = [name for name in self._tensors if name in names]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="load") as pool:
            list(pool.map(lambda name: _take(name, self._tensors[name], take), wanted))


@contextmanager
def named_in_errors(model: Path | None) -> Iterator[None]:
    """Name a GGUF file in errors about the checkpoint that is made of it; None: there is no such file."""
    try:
        yield
    except DeploymentError as error:
        if model is None or not is_gguf(model) or str(model) in str(error):
            raise
        raise DeploymentError(f"{model}: {error}") from None


def _has_scales(name: str, source: Source) -> bool:
    return source.tensor.type.name == MXFP4 and in_blocks(name, source)


def _take(name: str, source: Source, take: Callable[[str, Tensor], None]) -> None:
    """Call ``take`` with a tensor as the model holds it: uint8 in blocks ``[rows, bytes of a row]``, or decoded."""
    rows, kind = torch.from_numpy(source.rows()), source.tensor.type.name
    if _has_scales(name, source):
        weight, scales = mxfp4_parts(rows)
        take(name, weight)
        take(f"{name}_scale", scales)
        return
    if in_blocks(name, source):
        take(name, rows)
        return
    values = rows.view(_DTYPES[kind]) if kind in FLOATS else decode(rows, kind)
    values = values.reshape(source.shape)
    take(name, values + source.offset if source.offset else values)
