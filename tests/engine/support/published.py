"""Published models scaled down: the fields of each one's own ``config.json``, small sizes, and random weights."""

from __future__ import annotations

import functools
import json
import runpy
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from inflight.engine.models.reading import read_model_config
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import vary

FACTS = Path(__file__).parents[2] / "facts"
_SCRIPT = runpy.run_path(str(FACTS / "write_tensor_names.py"))
FAMILIES = sorted(path.stem for path in (FACTS / "published_configs").glob("*.json"))
VOCAB: int = _SCRIPT["SIZES"]["vocab_size"]
_SHORT = {"sliding_window": 8, "attention_chunk_size": 16, "floor_scale": 8}
"""Lengths, so that prompts are longer than they."""
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EXPERTS, _GROUPED = 4, {"n_group": 4, "topk_group": 2}
"""A token has two: which, the router decides. The script that this begins with has two in all."""


class Published(NamedTuple):
    """A published model, scaled down."""

    directory: Path
    model: Any
    """transformers'."""


def config_of(family: str) -> dict[str, Any]:
    """Return the published ``config.json`` of a family."""
    config: dict[str, Any] = json.loads((FACTS / f"published_configs/{family}.json").read_text())["config"]
    return config


def is_served(family: str) -> bool:
    """Whether the engine has code of its own for a family."""
    try:
        read_model_config(config_of(family))
    except DeploymentError as error:
        if "is not supported" not in str(error):
            raise
        return False
    return True


@functools.cache
def published(family: str) -> Published:
    """Return a family's model; made once per session."""
    data = config_of(family)
    config = _SCRIPT["tiny_config"](family, data)
    text = config.get_text_config()
    for name, length in _SHORT.items():
        if getattr(text, name, None):
            setattr(text, name, length)
    grouped = (data.get("n_group") or 1) > 1
    for name in _COUNTS:
        if getattr(text, name, None):
            setattr(text, name, _EXPERTS * (2 if grouped else 1))
    for name, count in _GROUPED.items() if grouped else ():
        setattr(text, name, count)
    if getattr(text, "no_rope_layers", None):
        text.no_rope_layers = [1, 0]
    for part in {id(one): one for one in (config, text)}.values():
        part.initializer_range, part.pad_token_id = 0.2, 0
    torch.manual_seed(sum(map(ord, family)))
    architecture = _SCRIPT["RENAMED"].get(data["architectures"][0], data["architectures"][0])
    kind = getattr(transformers, architecture)
    model = kind(config)
    vary(model)
    directory = Path(_folder().name) / family
    model.save_pretrained(directory)
    loaded = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return Published(directory, loaded.eval())


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inflight-published-")
