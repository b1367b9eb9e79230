"""The shape of a checkpoint's model for plans and builds: read from its ``config.json``, whoever's code computes it."""

from __future__ import annotations

from pathlib import Path

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.reading import is_known, read_model_config
from inflight.export.plan.precision import StoredWeights
from inflight.text.checkpoint import read_json


def read_shape(directory: Path) -> ModelConfig:
    """Return a model's shape. Of what Inflight has no code for, transformers' is called once, without weights.

    Raises:
        DeploymentError: ``config.json`` is missing, or says what is not supported.
    """
    data = read_json(directory / "config.json")
    if is_known(data):
        return read_model_config(data)
    from inflight.engine.models.adapted.known import require_known

    require_known(data)  # says what is missing before PyTorch is imported
    from inflight.engine.models.adapted.model import read_adapted_config

    return read_adapted_config(directory, data)


def is_quantized(directory: Path) -> bool:
    """Return whether a checkpoint says that it is quantized already."""
    described = "quantization_config" in read_json(directory / "config.json")
    return described or (directory / "hf_quant_config.json").is_file()


def stored_weights(directory: Path, config: ModelConfig) -> StoredWeights | None:
    """Return how a checkpoint holds its weights; None: it is not quantized.

    Raises:
        DeploymentError: it is quantized in a way that is not supported.
    """
    if not is_quantized(directory):
        return None
    from inflight.export.plan.stored import read_stored  # PyTorch comes with it

    return read_stored(directory, config)
