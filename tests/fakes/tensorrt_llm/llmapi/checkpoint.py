"""Reads a checkpoint's ``config.json`` as transformers 4.57 does: it takes no notice of ``rope_parameters``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_THETA = 10_000.0
_KNOWN = ("gemma2", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model types that need no code of their own."""


def read_config(directory: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Return the configuration as it is understood.

    Raises:
        ValueError: it needs code of the checkpoint, which is not trusted.
    """
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    if "auto_map" in config and config.get("model_type") not in _KNOWN and not trust_remote_code:
        raise ValueError(f"{directory} contains custom code; set trust_remote_code=True")
    config.pop("rope_parameters", None)
    return {"rope_theta": _THETA, "rope_scaling": None} | config


def write_as_read(directory: Path, config: dict[str, Any], to: Path) -> None:
    """Write a checkpoint into ``to`` that says what was understood; all but its configuration are links."""
    for file in directory.iterdir():
        if file.name != "config.json":
            (to / file.name).symlink_to(file.resolve())
    (to / "config.json").write_text(json.dumps(config))
