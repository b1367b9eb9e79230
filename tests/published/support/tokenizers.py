"""Loads published tokenizers, of GGUF files and of npm's packages."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.environments import Home
from benchmarks.published.fetched import MODELS, TOKENIZERS, model_path, tokenizer_path
from inflight.text.tokenizer import Tokenizer

ALL = (*TOKENIZERS, *(f"{name}.gguf" for name in MODELS))


def load_tokenizer(home: Home, name: str) -> Tokenizer:
    """Load a tokenizer of ``ALL``, or by a model's name that of its file; one of npm has no ``config.json``."""
    if name not in TOKENIZERS:
        return Tokenizer.from_checkpoint(model_path(home, name.removesuffix(".gguf")))
    with tempfile.TemporaryDirectory() as folder:
        for file in tokenizer_path(home, name).iterdir():
            Path(folder, file.name).symlink_to(file)
        Path(folder, "config.json").write_text("{}")
        return Tokenizer.from_checkpoint(Path(folder))
