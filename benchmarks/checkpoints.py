"""Checkpoints to measure with: Llama shapes with random weights, written once, always the same.

Speed does not depend on what weights say; what a model's text is good for does, and is measured on the demo model.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.errors import InflightError
from inflight.resources import DEMO

if TYPE_CHECKING:  # it takes seconds to load, and only making a checkpoint needs it
    from transformers import LlamaConfig

VOCAB = 4096
"""Prompts draw their tokens from so many; no shape has fewer."""
_TOLERANCE = 0.02


@dataclass(frozen=True)
class Experts:
    """A Mixture of Experts in place of each layer's feed-forward."""

    count: int
    per_token: int
    size: int
    """Intermediate size of each."""
    packed: bool = False
    """Whether they are in MXFP4."""


@dataclass(frozen=True)
class Shape:
    """A Llama shape, or with experts a Qwen3-MoE shape, with a head of its own for the output."""

    name: str
    parameters: float
    """As the name has it; the checkpoint has so many, but for 2 %."""
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    experts: Experts | None = None


SMALL = Shape("6.8M", 6.8e6, VOCAB, 256, 768, 6, 4, 2)
LARGE = Shape("125M", 125e6, 32_000, 768, 2048, 12, 12, 4)
SHAPES = {shape.name: shape for shape in (SMALL, LARGE)}
TINY = Shape("0.6M", 0.6e6, VOCAB, 64, 128, 2, 2, 1)
"""For quick runs: their figures say nothing."""
MAX_LENGTH = 4096
"""Tokens of a sequence, of every shape."""


def checkpoint(shape: Shape, folder: Path) -> Path:
    """Return the checkpoint's directory in ``folder``; it is made where it is not there yet.

    Raises:
        InflightError: the folder cannot be written.
    """
    return written_once(folder / f"llama-{shape.name}", lambda made: _write(shape, made))


def written_once(directory: Path, write: Callable[[Path], object]) -> Path:
    """Return a checkpoint's directory; where it is not there yet, ``write`` fills it.

    Raises:
        InflightError: it cannot be written.
    """
    folder = directory.parent
    if (directory / "config.json").is_file():
        return directory
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder))
        try:
            write(made)
            os.rename(made, directory)  # so that what is there is whole
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise InflightError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
    return directory


def servable(shape: Shape, folder: Path) -> Path:
    """Return the checkpoint's directory in ``folder``, with the demo's tokenizer and a word for each id that it lacks.

    Raises:
        InflightError: the folder cannot be written.
    """
    return written_once(folder / f"llama-{shape.name}-text", lambda made: _write_servable(shape, made))


def _write_servable(shape: Shape, directory: Path) -> None:
    _write(shape, directory)
    tokenizer = json.loads((DEMO / "model" / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"Ġword{token}": token for token in range(len(vocab), shape.vocab)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def llama_config(shape: Shape) -> LlamaConfig:
    """Return the shape in transformers' terms."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def _write(shape: Shape, directory: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama_config(shape))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert abs(parameters / shape.parameters - 1) < _TOLERANCE, f"{shape.name} has {parameters:,} parameters"
    model.save_pretrained(directory)
