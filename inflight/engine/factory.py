"""Makes the engine that a deployment names. Where there is not enough memory for it, the error says so in one line."""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING

from inflight.engine.config import EngineConfig
from inflight.engine.replay import Pace, ReplayEngine
from inflight.errors import DeploymentError, EngineFailure
from inflight.settings.deployment import Deployment
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.engine.engine import Engine

_NO_MEMORY = re.compile("out of memory|allocate memory|create a memory object|bad_alloc|ALLOC_FAILED", re.IGNORECASE)
"""How PyTorch (on a GPU ``torch.OutOfMemoryError``), oneDNN, C++ and cuBLAS say that there is not enough memory."""


def make_engine(deployment: Deployment, tokenizer: Tokenizer) -> Engine | ReplayEngine:
    """Return the engine, loaded and warmed up. From then on the garbage collector skips all objects made by then.

    Raises:
        DeploymentError: the checkpoint cannot be served, or there is not enough memory for it.
    """
    engine: Engine | ReplayEngine
    settings = deployment.engine
    if settings.kind == "replay":
        delays = (settings.replay_queue_ms, settings.replay_prefill_ms, settings.replay_step_ms)
        engine = ReplayEngine(EngineConfig.of(deployment), Pace(*(delay / 1000 for delay in delays)))
    else:
        engine = _load_portable(deployment, tokenizer)
    # The objects that exist now live to the end. Python's collector would look through them all, a third of a million
    # of PyTorch's, again and again while the engine serves: each time takes 0.16 s, in which no stream gets a token.
    gc.collect()
    gc.freeze()
    return engine


def _load_portable(deployment: Deployment, tokenizer: Tokenizer) -> Engine:
    from inflight.engine.device import resolve_device  # it imports PyTorch, which a replay does not need
    from inflight.engine.engine import Engine

    device = resolve_device(deployment.engine.device)
    config = EngineConfig.of(deployment, device.type == "cuda")
    try:
        engine = Engine.load(config, tokenizer)
        engine.warm_up()
    except (MemoryError, RuntimeError, EngineFailure) as error:
        fault = error.__cause__ if isinstance(error, EngineFailure) else error
        reason = str(fault).partition("\n")[0]
        if not isinstance(fault, MemoryError) and not _NO_MEMORY.search(reason):
            raise
        raise DeploymentError(
            f"not enough memory on {device} for the model, its KV cache and a step ({reason}); a smaller `kv_cache`, "
            "`batching.max_tokens_per_step` or `batching.max_batch_size` takes less"
        ) from None
    return engine
