"""Loads the portable engine, and says in one line that there is not enough memory for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from inflight.deployment import Deployment
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.model_runner import resolve_device
from inflight.errors import DeploymentError, EngineFailure
from inflight.text.tokenizer import Tokenizer

_NO_MEMORY = re.compile("out of memory|allocate memory|create a memory object|bad_alloc|ALLOC_FAILED", re.IGNORECASE)
"""What PyTorch says of it, on a GPU (``torch.OutOfMemoryError``), on a CPU, and of oneDNN, C++ and cuBLAS."""


def load_portable(deployment: Deployment, tokenizer: Tokenizer) -> Engine:
    """Return the portable engine, loaded and warmed up.

    Raises:
        DeploymentError: the checkpoint cannot be served, or there is not enough memory for it.
    """
    config = EngineConfig.of(deployment, resolve_device(deployment.engine.device).type == "cuda")
    with _lack_of_memory_named(config.device):
        engine = Engine.load(config, tokenizer)
        engine.warm_up()
    return engine


@contextmanager
def _lack_of_memory_named(device: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError, EngineFailure) as error:
        fault = error.__cause__ if isinstance(error, EngineFailure) else error
        reason = str(fault).partition("\n")[0]
        if not isinstance(fault, MemoryError) and not _NO_MEMORY.search(reason):
            raise
        raise DeploymentError(
            f"not enough memory on {resolve_device(device)} for the model, its KV cache and a step ({reason}); a "
            "smaller `kv_cache`, `batching.max_tokens_per_step` or `batching.max_batch_size` takes less"
        ) from None
