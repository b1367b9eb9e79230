"""What a checkpoint directory or a GGUF file says about its text: end ids, special tokens, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from inflight.errors import DeploymentError
from inflight.gguf.checkpoint import open_gguf
from inflight.gguf.files import LARGEST_FILE, is_gguf, read_whole

LARGEST_JSON = 8 << 20
"""Bytes of a file of settings, which takes up to 30 times as much memory while it is read."""
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class TextConfig:
    """The text side of a checkpoint."""

    vocab_size: int
    """The model's: the length of a row of logits. The tokenizer may know fewer tokens; its size is taken where
    ``config.json`` does not: the engine refuses a model that it does not know, by the architecture's name."""
    end_ids: frozenset[int]
    """Tokens that end a generation, by the checkpoint's own generation defaults."""
    pad_id: int | None
    special_tokens: Mapping[str, str]
    """``bos_token``, ``eos_token``, ...: the texts that chat templates refer to."""
    chat_template: str | None
    """Jinja source; None for a base model."""
    max_length: int | None = None
    """The longest sequence in tokens, by the model's own configuration; None: it does not say."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """How its makers sample, by ``generation_config.json``: temperature, top_p, top_k, min_p, repetition_penalty, as
    far as it names them; with ``do_sample: false`` the temperature is 0. Only OpenAI's endpoints go by it."""
    response_template: Mapping[str, Any] | None = None
    """How the model's output is to be read, where the tokenizer's settings say it (``text/output``)."""


def load_text_config(directory: Path, token_ids: Mapping[str, int]) -> TextConfig:
    """Read the text side of the checkpoint in ``directory``; ``token_ids`` is its tokenizer's vocabulary.

    Raises:
        DeploymentError: a file is missing or is not what it should be.
    """
    try:
        return _read(directory, token_ids)
    except OSError as error:
        raise DeploymentError(f"{directory}: cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DeploymentError(
            f"{directory}: its special tokens, end ids or chat template are not what they should be: {error!r}"
        ) from error


def _read(directory: Path, token_ids: Mapping[str, int]) -> TextConfig:
    model = read_json(directory / "config.json")
    model = {**model, **(model.get("text_config") or {})}
    generation = read_json(directory / "generation_config.json", optional=True)
    tokenizer = read_json(directory / "tokenizer_config.json", optional=True)
    special = read_json(directory / "special_tokens_map.json", optional=True) | tokenizer
    given = {name: special[name] for name in _SPECIAL_TOKENS if special.get(name)}
    tokens = {name: token if isinstance(token, str) else token["content"] for name, token in given.items()}
    ends = generation.get("eos_token_id", model.get("eos_token_id"))
    end_ids = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
    if not end_ids and tokens.get("eos_token") in token_ids:
        end_ids = frozenset({token_ids[tokens["eos_token"]]})
    if not all(map(_is_id, end_ids)):
        raise TypeError(f"eos_token_id is {ends!r}")
    if not all(isinstance(token, str) for token in tokens.values()):
        raise TypeError(f"special tokens are {tokens!r}")
    pad_id = generation.get("pad_token_id", model.get("pad_token_id"))
    if pad_id is None:
        pad_id = token_ids.get(tokens.get("pad_token", ""), min(end_ids, default=None))
    if pad_id is not None and not _is_id(pad_id):
        raise TypeError(f"pad_token_id is {pad_id!r}")
    vocab_size, max_length = model.get("vocab_size"), model.get("max_position_embeddings")
    if type(max_length) not in (int, NoneType):
        raise TypeError(f"max_position_embeddings is {max_length!r}")
    if type(vocab_size) is not int:
        vocab_size = max(token_ids.values(), default=-1) + 1
    template = tokenizer.get("chat_template")
    if (source := read_file(directory / "chat_template.jinja")) is not None:
        template = source.decode("utf-8")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str | None):
        raise TypeError(f"chat_template is {template!r}")
    response = tokenizer.get("response_template")
    if not isinstance(response, dict | None):
        raise TypeError(f"response_template is {response!r}")
    defaults = _sampling_defaults(generation)
    return TextConfig(vocab_size, end_ids, pad_id, tokens, template or None, max_length, defaults, response)


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    given = {name: generation[name] for name in _SAMPLING_DEFAULTS if generation.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}")
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    return given


def _is_id(value: Any) -> bool:
    """Return whether a value is one that a tensor of token ids can hold."""
    return type(value) is int and -(2**31) <= value < 2**31


def read_file(path: Path, largest: int = LARGEST_FILE) -> bytes | None:
    """Return a checkpoint's file, or what a GGUF file, in place of its directory, says instead; None: there is none.

    Raises:
        DeploymentError: it cannot be read, or has more than ``largest`` bytes, or the GGUF file says what is not
            supported.
    """
    if is_gguf(path.parent):
        return open_gguf(path.parent).read(path.name, largest)
    return read_whole(path, largest)


def read_json(path: Path, optional: bool = False, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """Read a JSON object from ``path``, of ``largest`` bytes at most; {} if it is ``optional`` and missing.

    Raises:
        DeploymentError: in one line, naming the file.
    """
    content = read_file(path, largest)
    if content is None:
        if optional:
            return {}
        raise DeploymentError(f"{path}: missing; the model must be a Hugging Face checkpoint directory or a GGUF file")
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DeploymentError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DeploymentError(f"{path}: a JSON object is expected")
    return value
