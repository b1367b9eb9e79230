"""Shapes of public models, as their ``config.json`` has them."""

from __future__ import annotations

import json
from pathlib import Path

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.reading import read_model_config

SHAPES = Path(__file__).parents[1] / "shapes"
GIB = 2**30


def shape(name: str) -> ModelConfig:
    """Return the configuration in ``shapes/<name>``."""
    return read_model_config(json.loads((SHAPES / name / "config.json").read_text()))
