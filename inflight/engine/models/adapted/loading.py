"""Loads a checkpoint into a model of transformers, by its own conversion of tensors; what is missing is an error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from inflight.engine.models.adapted import attention
from inflight.engine.models.naming import OTHER_PARTS
from inflight.engine.shards import Shards
from inflight.errors import DeploymentError

_FLOATS = ("F16", "BF16", "F32", "F64")
_MORE = 2
"""A model of so many times the parameters that its checkpoint has is refused before it gets memory: transformers
allocates all that config.json asks for before it says which tensors are missing."""
_PREFIXES = {
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
}
"""What text parts are called in checkpoints with images, and in the language model alone."""


def load_weights(
    kind: type[Any], directory: Path, config: Any, dtype: torch.dtype, is_text_part: bool, parameters: int
) -> Any:
    """Return a model of transformers with the checkpoint's weights, on the CPU.

    Args:
        kind: its class.
        directory: the checkpoint's.
        config: as the model has it that was outlined.
        dtype: of the computation.
        is_text_part: the checkpoint has parts besides, which are not served.
        parameters: how many the outlined model has.

    Raises:
        DeploymentError: a tensor is missing, unexpected, or of the wrong shape or type.
    """
    stored = _count_floats(directory)
    if parameters > _MORE * stored:
        raise DeploymentError(f"checkpoint: its files hold {stored:,} numbers; config.json asks for {parameters:,}")
    try:
        model, told = kind.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=attention.SERVING,
            key_mapping=_PREFIXES if is_text_part else None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told then, by name, and refused below
            use_safetensors=True,
            local_files_only=True,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise DeploymentError(
            f"checkpoint: transformers cannot load it: {' '.join(str(error).split())[:300]}"
        ) from None
    unexpected = sorted(name for name in told["unexpected_keys"] if not (is_text_part and OTHER_PARTS.match(name)))
    missing, wrong = sorted(told["missing_keys"]), sorted(told["mismatched_keys"])
    if unexpected:
        raise DeploymentError(f"checkpoint: tensor {unexpected[0]} has no place in this architecture")
    if missing:
        raise DeploymentError(f"checkpoint: no tensor for {', '.join(missing[:5])} ({len(missing)} in all)")
    if wrong:
        name, found, expected = wrong[0]
        raise DeploymentError(f"checkpoint: tensor {name} is {list(found)}; expected {list(expected)}")
    if told.get("error_msgs"):
        raise DeploymentError(f"checkpoint: {' '.join(str(told['error_msgs'][0]).split())[:300]}")
    return model.eval().requires_grad_(False)


def _count_floats(directory: Path) -> int:
    """Return how many numbers the files hold.

    Raises:
        DeploymentError: a file cannot be read; or weights are not stored as floats: transformers takes what other types
            hold as numbers.
    """
    count = 0
    for file in Shards(directory).files:
        for name, shape, dtype in _stored(file):
            count += math.prod(shape)
            is_mask = len(shape) > 3  # some checkpoints have those of attention, which nobody reads
            if name.endswith((".weight", ".bias")) and dtype not in _FLOATS and not is_mask:
                raise DeploymentError(f"checkpoint: tensor {name} is {dtype}; a float is expected")
    return count


def _stored(file: Path) -> list[tuple[str, list[int], str]]:
    """Return name, shape and type of each tensor in a file."""
    try:
        with safe_open(file, framework="pt") as shard:
            slices = [(name, shard.get_slice(name)) for name in list(shard.keys())]
            return [(name, stored.get_shape(), stored.get_dtype()) for name, stored in slices]
    except (OSError, SafetensorError) as error:
        raise DeploymentError(f"{file}: cannot be read: {error}") from None
