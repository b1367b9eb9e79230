"""A GGUF file with changed bytes is refused in one line or loads, and takes little memory and time."""

from __future__ import annotations

import re
import struct
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from inflight.engine.checkpoint import load_config, load_model, outline_model
from inflight.errors import DeploymentError
from inflight.gguf.reader import GgufModel
from inflight.text.tokenizer import Tokenizer
from tests.engine.support.gguf_files import GgufFile, gguf_file, wide_gguf_file
from tests.engine.support.native import CPU

HURTFUL = (0, 1, 2, 3, 7, 8, 9, 12, 39, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 64) - 1)
"""What numbers are replaced by: types, edges of counts, and lengths that no file has."""
FLOATS = (0.0, -1.0, 1e-30, 3e38, float("nan"), float("inf"))
_UINT32, _FLOAT32 = 4, 6
FILES: dict[str, Callable[[], GgufFile]] = {
    "llama": lambda: gguf_file("llama 3.1"),
    "gemma": lambda: gguf_file("gemma3, tied, linear"),
    "experts": lambda: gguf_file("gpt-oss", "F32", ((".experts.", "MXFP4"),)),
    "blocks": lambda: wide_gguf_file("Q4_K", tied=True),
}
NAMED = {"experts": (63,), "blocks": (97,)}
"""Mutations that are refused when the model is built, by code that knows no file."""
_MOST_BYTES, _MOST_SECONDS = 64 << 20, 20
"""Of memory that Python takes, and of the processor."""


def _mutated(content: bytes, header: int, seed: int) -> bytes:
    """Return a file with a change or a few in its header, which has so many bytes; and some files are cut."""
    random, data = np.random.default_rng(seed), bytearray(content)
    names = list(re.finditer(rb"[a-z0-9_]+\.[a-z0-9_.]+", content[:header]))
    for _ in range(random.integers(1, 4)):
        name = names[int(random.integers(len(names)))]
        if random.random() < 0.7:
            _change_named(data, name, random)
            continue
        at = int(random.integers(header)) if random.random() < 0.5 else name.end()
        size, other = int(random.choice([1, 2, 4, 8])), int(random.integers(header))
        match random.integers(3):
            case 0:
                data[at : at + size] = struct.pack("<Q", HURTFUL[int(random.integers(len(HURTFUL)))])[:size]
            case 1:
                data[at : at + size] = data[other : other + size]
            case 2:
                del data[at : at + size]
    if random.random() < 0.1:
        del data[int(random.integers(len(data))) :]
    return bytes(data)


def _change_named(data: bytearray, name: re.Match[bytes], random: np.random.Generator) -> None:
    """Change what has a name, and nothing around it: a value, a tensor's shape or type, or the name itself."""
    end, hurtful = name.end(), HURTFUL[int(random.integers(len(HURTFUL)))]
    (follows,) = struct.unpack_from("<I", data, end)
    if name[0].endswith((b".weight", b".bias")) and random.random() < 0.8:
        if random.random() < 0.5:  # a dimension, by a factor
            (size,) = struct.unpack_from("<Q", data, end + 4)
            struct.pack_into("<Q", data, end + 4, min(size * 2, (1 << 64) - 1) if random.random() < 0.5 else size // 2)
        else:
            struct.pack_into("<I", data, end + 4 + 8 * min(follows, 4), int(random.integers(43)))
    elif follows == _UINT32 and random.random() < 0.8:
        struct.pack_into("<I", data, end + 4, min(hurtful, (1 << 32) - 1))
    elif follows == _FLOAT32 and random.random() < 0.8:
        struct.pack_into("<f", data, end + 4, FLOATS[int(random.integers(len(FLOATS)))])
    else:
        data[int(random.integers(name.start(), end))] = ord("x")


def _load(path: Path) -> None:
    """Read all that a start reads, and load the weights."""
    config = load_config(path)
    Tokenizer.from_checkpoint(path)
    load_model(outline_model(path, config, torch.float32, CPU, 64, "auto"), CPU)


def _try(name: str, seeds: Sequence[int], folder: Path) -> None:
    """Load a file, and mutations of it."""
    source = FILES[name]().path
    _load(source)
    content = source.read_bytes()
    header = min(tensor.first for tensor in GgufModel(source).tensors.values())
    path = folder / "m.gguf"
    for seed in seeds:
        path.write_bytes(_mutated(content, header, seed))
        started = time.process_time()
        tracemalloc.start()
        refusal = ""
        try:
            _load(path)
        except DeploymentError as error:
            refusal = str(error)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "\n" not in refusal, seed
        assert not refusal or path.name in refusal, seed
        assert peak < _MOST_BYTES, seed
        assert time.process_time() - started < _MOST_SECONDS, seed


@pytest.mark.sweep
@pytest.mark.parametrize("name", FILES)
def test_mutated_files_are_refused_or_load(name: str, tmp_path: Path) -> None:
    _try(name, (*range(30), *NAMED.get(name, ())), tmp_path)


@pytest.mark.release
@pytest.mark.parametrize("name", FILES)
def test_many_mutated_files_are_refused_or_load(name: str, tmp_path: Path) -> None:
    _try(name, range(30, 530), tmp_path)
