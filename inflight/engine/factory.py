"""Makes the engine that a deployment names."""

from __future__ import annotations

from inflight.deployment import Deployment
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.replay import ReplayEngine
from inflight.text.tokenizer import Tokenizer


def make_engine(deployment: Deployment, tokenizer: Tokenizer) -> Engine | ReplayEngine:
    """Return the engine, loaded and warmed up.

    Raises:
        DeploymentError: the checkpoint cannot be served.
    """
    config = EngineConfig.of(deployment)
    engine: Engine | ReplayEngine
    if deployment.engine.kind == "replay":
        engine = ReplayEngine(config, deployment.engine.replay_step_ms / 1000)
    else:
        engine = Engine.load(config, tokenizer)
    engine.warm_up()
    return engine
