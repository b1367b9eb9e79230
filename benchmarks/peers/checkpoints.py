"""The checkpoints that every contender gets: random weights in bfloat16, or gpt-oss' packed experts, and a tokenizer.

The tokenizer is made up: every id is a few letters, so that whatever a model with random weights says is text, and a
word of up to three letters is one token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

from benchmarks.checkpoints import LARGE, Experts, Shape, written_once
from benchmarks.peers.gpt_oss import GPT_OSS, gpt_oss_config, gpt_oss_tensors

if TYPE_CHECKING:  # it takes seconds to load, and only making a checkpoint needs it
    from torch import Tensor

TINYLLAMA = Shape("1.1B", 1.1e9, 32_000, 2048, 5632, 22, 32, 4)
LLAMA3 = Shape("8B", 8.03e9, 128_256, 4096, 14_336, 32, 32, 8)
MOE = Shape("1.3B-A0.25B", 1.34e9, 32_000, 1024, 2048, 24, 16, 4, Experts(32, 4, 512))
"""A token goes through 0.25 billion of its parameters: a quarter of a billion without the embedding."""
LARGE_MOE = Shape("3.5B-A1.0B", 3.52e9, 32_000, 2048, 6144, 16, 16, 4, Experts(32, 8, 1024))
"""A token goes through 1.04 billion of its parameters, without the embedding."""
SHAPES = {shape.name: shape for shape in (LARGE, TINYLLAMA, LLAMA3, MOE, LARGE_MOE, GPT_OSS)}
LONGEST = 8192
"""Tokens of a sequence, of every shape."""
_SHARD_BYTES = 1 << 30
_SPACE = "\u0120"
"""How byte-level tokenizers write a space."""


def checkpoint(shape: Shape, folder: Path) -> Path:
    """Return the checkpoint's directory in ``folder``; it is made where it is not there yet.

    Raises:
        InflightError: the folder cannot be written.
    """
    if _is_packed(shape):
        return written_once(folder / f"{shape.name}-mxfp4", lambda made: _write(shape, made))
    kind = "qwen3moe" if shape.experts else "llama"
    return written_once(folder / f"{kind}-{shape.name}-bf16", lambda made: _write(shape, made))


def _is_packed(shape: Shape) -> bool:
    return shape.experts is not None and shape.experts.packed


def _write(shape: Shape, directory: Path) -> None:
    from benchmarks.random_weights import config_of

    packed = _is_packed(shape)
    config = gpt_oss_config(shape) if packed else config_of(shape) | {"max_position_embeddings": LONGEST}
    _write_weights(shape, directory)
    write_tokenizer(shape.vocab, directory)
    (directory / "config.json").write_text(json.dumps(config))  # the last: with it, the checkpoint is there


def _write_weights(shape: Shape, directory: Path) -> None:
    from safetensors.torch import save_file

    waiting, found = dict[str, "Tensor"](), dict[str, str]()

    def flush() -> None:
        file = f"model-{len(set(found.values())):05}.safetensors"
        save_file(waiting, directory / file, {"format": "pt"})
        found.update(dict.fromkeys(waiting, file))
        waiting.clear()

    def take(name: str, tensor: Tensor) -> None:
        waiting[name] = tensor
        if sum(one.nbytes for one in waiting.values()) >= _SHARD_BYTES:
            flush()

    _draw(shape, take)
    flush()
    index = {"metadata": {}, "weight_map": found}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _draw(shape: Shape, take: Callable[[str, Tensor], None]) -> None:
    """Call ``take`` with each tensor of the checkpoint."""
    import torch

    from benchmarks.random_weights import RandomShards

    if _is_packed(shape):
        for name, tensor in gpt_oss_tensors(shape):
            take(name, tensor)
    else:
        shards = RandomShards(shape, False, torch.device("cpu"))
        shards.load(shards.names, take)


def write_tokenizer(vocab: int, directory: Path) -> None:
    """Write a byte-level tokenizer of ``vocab`` ids: bytes, and pieces of letters with and without a space before.

    Raises:
        ValueError: there are not so many pieces.
    """
    ids = {byte: number for number, byte in enumerate(byte_letters())}
    merges = list[tuple[str, str]]()
    for left, right in itertools.islice(_merges(), vocab - len(ids)):
        ids[left + right] = len(ids)
        merges.append((left, right))
    if len(ids) != vocab:
        raise ValueError(f"a vocabulary of {vocab}: only {len(ids)} pieces can be made")
    model = {"type": "BPE", "vocab": ids, "merges": merges, "byte_fallback": False, "ignore_merges": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts = {"model": model, "pre_tokenizer": byte_level, "decoder": byte_level}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    tokenizer: dict[str, object] = {"version": "1.0", "added_tokens": [], **nothing, **parts}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _merges() -> Iterator[tuple[str, str]]:
    """Yield which two pieces make the next one: both are there by then."""
    letters = ascii_lowercase
    yield from ((_SPACE, one) for one in letters)
    pieces = list(letters)
    while len(pieces[0]) < 4:
        longer = list(itertools.product(pieces, letters))
        for left, right in longer:
            yield left, right
            yield _SPACE + left, right
        pieces = [left + right for left, right in longer]


def byte_letters() -> list[str]:
    """Return the 256 letters that byte-level tokenizers write bytes as, in GPT-2's order."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    return [chr(byte) for byte in shown] + [chr(256 + place) for place in range(256 - len(shown))]
