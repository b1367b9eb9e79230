"""A GGUF model as the files that a Hugging Face checkpoint has, and its tensors by their names there.

The path of the model's file stands for the checkpoint's directory: what ``model.gguf/config.json`` would say is made of
the file's metadata. So whoever reads a checkpoint's files by their paths reads a GGUF model too.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from inflight.errors import DeploymentError
from inflight.gguf.config import dtype_of, read_config
from inflight.gguf.files import LARGEST_FILE, read_whole
from inflight.gguf.header import TensorInfo
from inflight.gguf.metadata import EMBEDDING, HEAD, Described
from inflight.gguf.names import Source, checkpoint_tensors
from inflight.gguf.reader import GgufModel
from inflight.gguf.tokenizer import described_files, tokenizer_files
from inflight.gguf.types import FLOATS, QUANTIZED, SERVED, packed_together
from inflight.precedence import overruled

log = logging.getLogger(__name__)

_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_OF_TEXT = (
    "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip
"""What goes with ``tokenizer.json``."""
_PART = re.compile(r"(?<=attn_)[qkv](?=\.weight)|(?<=ffn_)(gate|up)(?=(_exps|_shexp)?\.weight)")
"""What tells apart the tensors of one product: queries, keys and values; gates and what they are multiplied with."""


class GgufCheckpoint:
    """What one model says, in the words of a checkpoint."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            DeploymentError: a file is missing or is not what it should be; it is named.
        """
        log.info("reading %s", path.name)
        self.model = GgufModel(path)
        directory = self.model.path.parent
        self._text_directory = directory if (directory / _TOKENIZER).exists() else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.json``. Raises DeploymentError: its architecture is not served, or its metadata are wrong."""
        return read_config(self.model)

    @cached_property
    def tensors(self) -> dict[str, Source]:
        """By their names in a checkpoint. Raises DeploymentError."""
        return checkpoint_tensors(self.model, self.config)

    @property
    def blocks(self) -> dict[str, str]:
        """The linears whose weights are in blocks, by their names in a checkpoint, with the blocks' type."""
        return {
            name.removesuffix(".weight"): source.tensor.type.name
            for name, source in self.tensors.items()
            if in_blocks(name, source)
        }

    def read(self, name: str, largest: int = LARGEST_FILE) -> bytes | None:
        """Return what a file of the checkpoint would hold; None: it has no such file.

        If a ``tokenizer.json`` lies beside the model's file, it is taken with the files that go with it; those that are
        missing are made of the metadata.

        Raises:
            DeploymentError: what it would be made of is not supported, or missing, or wrong, or a file beside the
                model's has more than ``largest`` bytes.
        """
        if name == _CONFIG:
            return json.dumps(self.config).encode()
        if name != _TOKENIZER and name not in _OF_TEXT:
            return None
        if self._text_directory is not None:
            file = self._text_directory / name
            if name == _TOKENIZER:
                overruled("GGUF: tokenizer", str(file), self.model.path.name, "tokenizer.ggml.*")
            if (content := read_whole(file, largest)) is not None:
                return content
        return json.dumps(self._text[name]).encode() if name in self._text else None

    @cached_property
    def _text(self) -> dict[str, dict[str, Any]]:
        return tokenizer_files(self.model) if self._text_directory is None else described_files(self.model)


_opened: WeakValueDictionary[Path, GgufCheckpoint] = WeakValueDictionary()


def open_gguf(model: Path) -> GgufCheckpoint:
    """Return the model of a file, which is read once as long as somebody holds it.

    Raises:
        DeploymentError: a file is missing or is not what it should be; it is named.
    """
    held = _opened.get(model)
    if held is None:
        held = _opened[model] = GgufCheckpoint(model)
    return held


def in_blocks(name: str, source: Source) -> bool:
    """Whether a tensor stays in blocks: a linear's weight. An embedding's rows are looked up, and decoded before."""
    linear = len(source.shape) == 2 and name.endswith(".weight") and not name.endswith("embed_tokens.weight")
    return linear and source.tensor.type.name not in FLOATS


def require_types(model: Described) -> None:
    """Require that all tensors are of types that are served. Raises DeploymentError, which names the first other."""
    for tensor in model.tensors.values():
        if tensor.type.name not in SERVED:
            raise DeploymentError(
                f"{model.path}: tensor {tensor.name!r:.200} is in {tensor.type.name}; supported: {', '.join(SERVED)}"
            )


def cpu_bytes(model: Described) -> int:
    """Return the memory of a model's weights on a CPU, in bytes.

    Linears are as the native step packs their blocks; all else is in the type of the computation, and so is an
    embedding, of which a head that has no tensor of its own is made.
    """
    whole = 16 if dtype_of(model) == "bfloat16" else 32
    products = defaultdict[str, list[TensorInfo]](list)
    for name, tensor in model.tensors.items():
        products[_PART.sub("", name)].append(tensor)
    bits = dict[str, float]()
    for tensors in products.values():
        packed = {one.name: QUANTIZED[one.type.name] for one in tensors if _is_packed(one)}
        together = packed_together(packed.values()).bits_of_weight if packed else whole
        bits |= {one.name: together if one.name in packed else whole for one in tensors}
    if EMBEDDING in bits:
        bits[EMBEDDING] = whole if HEAD in bits else whole + bits[EMBEDDING]
    return int(sum(math.prod(tensor.shape) * bits[name] for name, tensor in model.tensors.items()) / 8)


def _is_packed(tensor: TensorInfo) -> bool:
    return tensor.type.name in QUANTIZED and len(tensor.shape) > 1
