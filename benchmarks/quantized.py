"""Quantized checkpoints to measure with: ModelOpt's, written once, as `inflight build` has it write them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.checkpoints import written_once
from benchmarks.drive import prompts
from inflight.export.data import Example
from inflight.export.quantize.modelopt import QuantizedModel, Recipe, quiet

_PROMPTS, _LENGTH = 4, 64
_BLOCK = 1 << 20
"""Bytes that are read at a time."""


def random_examples() -> list[Example]:
    """Return what a model with random weights is calibrated on: prompts like those it is measured with."""
    drawn = prompts(np.random.default_rng(0), _PROMPTS, _LENGTH)
    return [Example((), tuple(tokens), chat=False) for tokens in drawn]


def quantized_checkpoint(
    folder: Path, source: Path, name: str, precision: str, examples: Sequence[Example] | None = None
) -> Path:
    """Return a checkpoint in a precision, as a directory in ``folder``; it is made where it is not there yet.

    Args:
        folder: of checkpoints.
        source: the checkpoint that is quantized.
        name: of the model; it names the directory, with precision, number of examples and a hash of source's weights.
        precision: of ``inflight build``.
        examples: to calibrate on; random prompts without.

    Raises:
        InflightError: ModelOpt refuses the checkpoint, or the folder cannot be written.
    """
    examples = random_examples() if examples is None else examples
    directory = folder / f"{name}-{precision}-{len(examples)}-{_hash_of(source)}"

    def write(made: Path) -> None:
        with quiet(folder / "modelopt.log"):
            QuantizedModel(source, Recipe(precision, False), examples, "cpu", lambda *_: None).save(made)

    return written_once(directory, write)


def _hash_of(source: Path) -> str:
    """Return a short hash of a checkpoint's weights."""
    found = hashlib.sha256()
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
    return found.hexdigest()[:8]
