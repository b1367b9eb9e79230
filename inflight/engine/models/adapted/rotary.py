"""Rotary embeddings of transformers' models whose frequencies would depend on the longest sequence of a step.

There the longest position of a step, whoever's it is, chooses the frequencies of all. Here the longest sequence that
will be served settles them once, as in our own models (``models.rope``).
"""

from __future__ import annotations

import inspect
import types
from typing import Any

from torch import nn

from inflight.errors import DeploymentError


def settle_frequencies(model: nn.Module, served_length: int) -> int:
    """Settle the frequencies of a model; return of how many modules.

    Raises:
        DeploymentError: a module changes its frequencies in a way that is not known, or by wrong parameters.
    """
    found = 0
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        of_layers = kinds if isinstance(kinds, dict) else {None: kinds}
        changing = {one: str(kind) for one, kind in of_layers.items() if kind == "longrope" or "dynamic" in str(kind)}
        for layer_type, kind in changing.items():
            _settle(name, module, layer_type, kind, served_length)
        if changing:
            found += 1
            module.forward = types.MethodType(_plain_forward(name, module), module)
    return found


def _settle(name: str, module: Any, layer_type: str | None, kind: str, served_length: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = "" if layer_type is None else f"{layer_type}_"
    before = getattr(module, f"{prefix}inv_freq", None)
    if kind not in ROPE_INIT_FUNCTIONS or before is None:
        raise DeploymentError(f"{name}: rope_type {kind!r} is not supported with transformers' code")
    more = {} if layer_type is None else {"layer_type": layer_type}
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](module.config, before.device, seq_len=served_length, **more)
    except Exception as error:  # whatever its parameters make of the computation
        line = " ".join(str(error).split())[:200]
        raise DeploymentError(
            f"{name}: rope_type {kind!r} cannot be computed with the parameters in config.json: "
            f"{type(error).__name__}: {line}"
        ) from None
    if frequencies.shape != before.shape:
        raise DeploymentError(
            f"{name}: rope_type {kind!r} has {len(frequencies)} frequencies; {len(before)} are expected"
        )
    module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    setattr(module, f"{prefix}attention_scaling", scale)


def _plain_forward(name: str, module: nn.Module) -> Any:
    """Return the forward pass without the decorator that changes frequencies."""
    plain = inspect.unwrap(type(module).forward)
    if plain is type(module).forward:
        raise DeploymentError(f"{name}: {type(module).__name__} changes its frequencies in a way that is not supported")
    return plain
