"""How a checkpoint makes an embedding of its hidden states, as the files of sentence-transformers beside it say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from inflight.errors import DeploymentError
from inflight.sampling import Pooling
from inflight.text.files import LARGEST_JSON, read_file, read_json

_MODES: Mapping[str, Pooling] = {
    "lasttoken": "last",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "pooling_mode_mean_tokens": "mean",
}
"""The poolings that are served, by what ``1_Pooling/config.json`` calls them, in its two forms."""
_PARTS = ("Transformer", "Pooling", "Normalize")
"""The modules that are served: an embedding is the pooled hidden state, normalized."""


@dataclass(frozen=True)
class EmbeddingFormat:
    """How embeddings are made."""

    pooling: Pooling = "last"
    why_not: str = ""
    """Why the checkpoint's embeddings cannot be made here; '': they can."""
    hidden_size: int | None = None
    """The length of an embedding; None: the checkpoint does not say."""
    shorter: tuple[int, ...] | None = None
    """The lengths to which an embedding may be cut, as the checkpoint was trained to be (Matryoshka); (): all; None:
    it must not be cut."""


def read_embedding_format(directory: Path, pooling: Pooling | Literal["auto"] = "auto") -> EmbeddingFormat:
    """Return the format of a checkpoint's embeddings; a ``pooling`` takes the place of what it says itself.

    Raises:
        DeploymentError: a file is not what it should be.
    """
    try:
        return _read(directory, pooling)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DeploymentError(f"{directory}: modules.json or a file that it names is broken: {error!r}") from error


def _read(directory: Path, pooling: Pooling | Literal["auto"]) -> EmbeddingFormat:
    model = read_json(directory / "config.json")
    model = {**model, **(model.get("text_config") or {})}
    size, shorter = model.get("hidden_size"), model.get("matryoshka_dimensions")
    lengths = tuple(int(length) for length in shorter or ()) if shorter or model.get("is_matryoshka") else None
    own, why_not = _pooling(directory) if pooling == "auto" else (pooling, "")
    return EmbeddingFormat(own, why_not, size if type(size) is int else None, lengths)


def _pooling(directory: Path) -> tuple[Pooling, str]:
    """Return what ``modules.json`` says of pooling, and why it is not served; without the file: the last token's."""
    content = read_file(directory / "modules.json", LARGEST_JSON)
    if content is None:
        return "last", ""
    modules: list[Mapping[str, Any]] = json.loads(content)
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in _PARTS:
            return "last", f"its modules.json has a module {kind!r}; those served are {', '.join(_PARTS)}"
    if "Pooling" not in kinds:
        return "last", ""
    path = Path(modules[kinds.index("Pooling")]["path"]).name
    config = read_json(directory / path / "config.json")
    given = config.get("pooling_mode")
    flags = [name for name, value in config.items() if value is True and name.startswith("pooling_mode_")]
    modes = [given] if isinstance(given, str) else flags
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]], ""
    return "last", f"its pooling is {' with '.join(modes) or 'none'}; last token and mean are served"
