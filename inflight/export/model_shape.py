"""What plans and builds ask of a checkpoint: the shape of its model, and how it holds the weights."""

from __future__ import annotations

from pathlib import Path

from inflight.engine.models.adapted.known import require_known
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.reading import is_known, read_model_config
from inflight.errors import DeploymentError
from inflight.export.plan.precision import StoredWeights
from inflight.gguf.checkpoint import open_gguf
from inflight.gguf.files import is_gguf
from inflight.text.files import read_json


def read_shape(directory: Path) -> ModelConfig:
    """Return the shape of the model in a checkpoint directory, or in a GGUF file.

    Of what Inflight has no code for, transformers' code is called once, without weights.

    Raises:
        DeploymentError: ``config.json`` is missing, or says what is not supported.
    """
    data = read_json(directory / "config.json")
    if is_known(data):
        return read_model_config(data)
    require_known(data)  # says what is missing before PyTorch is imported
    from inflight.engine.models.adapted.model import read_adapted_config

    return read_adapted_config(directory, data)


def is_quantized(directory: Path) -> bool:
    """Return whether the checkpoint in a directory says that it is quantized already."""
    described = read_json(directory / "config.json").get("quantization_config")
    return described is not None or (directory / "hf_quant_config.json").is_file()


def stored_weights(directory: Path, config: ModelConfig) -> StoredWeights | None:
    """Return how a checkpoint directory, or a GGUF file, holds its weights; None: it is not quantized.

    Raises:
        DeploymentError: it is quantized in a way that is not supported, or is a file with weights in blocks.
    """
    if is_gguf(directory) and (blocks := open_gguf(directory).blocks):
        raise DeploymentError(
            f"{directory}: its weights are in {', '.join(sorted(set(blocks.values())))}; GGUF files in blocks are not "
            "planned, and `inflight models` shows the memory of one that was pulled"
        )
    if not is_quantized(directory):
        return None
    from inflight.export.plan.stored import read_stored  # PyTorch comes with it

    return read_stored(directory, config)
