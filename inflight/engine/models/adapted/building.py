"""Builds a model of transformers from a checkpoint's ``config.json``, without its weights, and says what it cannot be.

transformers is an optional package, and imported only where a deployment needs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inflight.engine.models.adapted import attention, experts
from inflight.engine.models.adapted.known import require_known, require_sizes_read, require_unquantized
from inflight.engine.models.reading import CONDITIONAL, architecture_name
from inflight.errors import DeploymentError

_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers that attend as the engine does; others have a state, or choose what they attend to."""
_MIXING = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.modules.batchnorm._BatchNorm)
"""Layers whose result for a token depends on tokens beside it, or on all of a batch."""


def prepare_transformers(data: Mapping[str, Any]) -> None:
    """Prepare the package to serve the model of a ``config.json``.

    Raises:
        DeploymentError: it is not there, or has no code for the model.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is ever fetched: neither models nor kernels
    require_known(data)
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    attention.register()
    experts.register()


def read_config(directory: Path, data: Mapping[str, Any]) -> Any:
    """Return the configuration of the language model, as transformers has it; ``data``: of ``config.json``.

    Raises:
        DeploymentError: transformers knows no such model, or it is one that cannot be served.
    """
    import transformers

    name = architecture_name(data)
    require_unquantized(data)
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a configuration's own code raises about a file
        raise DeploymentError(f"config.json: transformers cannot read it: {_line(error)}") from None
    if config.is_encoder_decoder:
        raise DeploymentError(f"config.json: is_encoder_decoder is true ({name}); only decoders are served")
    whole, config = config, _text_part(config)
    if whole is not config and not name.endswith(CONDITIONAL):
        raise DeploymentError(f"config.json: architecture {name} is no causal language model of transformers'")
    if data.get("text_config") and data.get("tie_word_embeddings") is not None:
        config.tie_word_embeddings = data["tie_word_embeddings"]  # where a model takes images, it stands outside
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - _LAYER_TYPES
    if kinds:
        raise DeploymentError(
            f"config.json: layer_types has {', '.join(map(repr, sorted(kinds)))}; with transformers' code only layers "
            f"of {', '.join(sorted(_LAYER_TYPES))} are served"
        )
    require_sizes_read(config)
    return config


def _text_part(config: Any) -> Any:
    """Return the configuration of the language model; it is the whole one, or a part of it."""
    from transformers import PreTrainedConfig

    text = config.get_text_config(decoder=True)
    if not isinstance(text, PreTrainedConfig):  # a field by that name, in a file of a model that has no parts
        raise DeploymentError(f"config.json: a model_type {config.model_type!r} has no text part, but the file has one")
    return text


def build(config: Any, dtype: torch.dtype) -> Any:
    """Return the model on the meta device.

    Raises:
        DeploymentError: transformers has no language model for it, or it has layers that are not supported.
    """
    import transformers

    kind = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise DeploymentError(f"config.json: transformers has no causal language model for {type(config).__name__}")
    config._experts_implementation = experts.NAME
    try:
        with torch.device("meta"):
            model = kind._from_config(config, attn_implementation=attention.SERVING, dtype=dtype)
    except KeyError as error:
        own = error.args == (attention.SERVING,)
        why = "it has attention of its own, which is not supported" if own else f"there is no {_line(error)}"
        raise DeploymentError(f"{kind.__name__}: {why}") from None
    except Exception as error:  # whatever a model's own code raises about its configuration
        raise DeploymentError(f"config.json: transformers cannot build {kind.__name__}: {_line(error)}") from None
    for name, module in model.named_modules():
        if isinstance(module, _MIXING):
            raise DeploymentError(f"{kind.__name__}: {name} is a {type(module).__name__}; it is not supported")
    return model.eval().requires_grad_(False)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
