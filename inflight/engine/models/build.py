"""Chooses the model that computes an architecture."""

from __future__ import annotations

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.gemma4 import Gemma4Model
from inflight.engine.models.hybrid import HybridModel


def build_model(config: ModelConfig, served_length: int) -> DecoderModel:
    """Return the model for ``config``, without weights; ``served_length``: the longest sequence to serve."""
    kind = Gemma4Model if config.gemma4 else HybridModel if config.recurrent else DecoderModel
    return kind(config, served_length)
