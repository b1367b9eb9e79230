"""Makes the engine that a deployment names."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from inflight.deployment import Deployment
from inflight.engine.config import EngineConfig
from inflight.engine.replay import Pace, ReplayEngine
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.engine.engine import Engine


def make_engine(deployment: Deployment, tokenizer: Tokenizer) -> Engine | ReplayEngine:
    """Return the engine, loaded and warmed up; what the process has made by then, its garbage collector leaves alone.

    Raises:
        DeploymentError: the checkpoint cannot be served, or there is not enough memory for it.
    """
    engine: Engine | ReplayEngine
    if deployment.engine.kind == "replay":
        engine = _replay(deployment)
    else:
        from inflight.engine.portable import load_portable  # with PyTorch, which a replay is ready without

        engine = load_portable(deployment, tokenizer)
    # What is there now stays. Python's collector would look through it all, a third of a million objects of PyTorch's,
    # again and again while it serves: 0.16 s, in which no stream gets a token.
    gc.collect()
    gc.freeze()
    return engine


def _replay(deployment: Deployment) -> ReplayEngine:
    settings = deployment.engine
    delays = (settings.replay_queue_ms, settings.replay_prefill_ms, settings.replay_step_ms)
    engine = ReplayEngine(EngineConfig.of(deployment), Pace(*(delay / 1000 for delay in delays)))
    engine.warm_up()
    return engine
