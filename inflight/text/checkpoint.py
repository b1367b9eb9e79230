"""What a checkpoint directory or a GGUF file says about its text: end ids, special tokens, chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from inflight.errors import DeploymentError
from inflight.precedence import first_said, overruled
from inflight.text.files import read_json
from inflight.text.settled import CONFIG, GENERATION, TOKENIZER, end_ids, read_sampling_defaults, read_templates

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class TextConfig:
    """The text side of a checkpoint."""

    vocab_size: int
    """The model's: the length of a row of logits. The tokenizer may know fewer tokens; its size is taken where
    ``config.json`` does not: the engine refuses a model that it does not know, by the architecture's name."""
    end_ids: frozenset[int]
    """Tokens that end a generation: all that the checkpoint's files name."""
    pad_id: int | None
    special_tokens: Mapping[str, str]
    """``bos_token``, ``eos_token``, ...: the texts that chat templates refer to."""
    chat_template: str | None
    """Jinja source of the ``default`` template; None for a base model."""
    max_length: int | None = None
    """The longest sequence in tokens, by the model's own configuration; None: it does not say."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """How its makers sample: temperature, top_p, top_k, min_p, repetition_penalty, as far as it names them."""
    response_template: Mapping[str, Any] | None = None
    """How the model's output is to be read, where the tokenizer's settings say it (``text/output``)."""
    tool_template: str | None = None
    """Jinja source of the template ``tool_use``, which is taken where tools are given; None: there is none."""

    @property
    def templates(self) -> str:
        """The sources of all chat templates; empty: there is none."""
        return "\n".join(filter(None, dict.fromkeys((self.chat_template, self.tool_template))))


def load_text_config(directory: Path, token_ids: Mapping[str, int], special: Mapping[str, int]) -> TextConfig:
    """Read the text side of the checkpoint in ``directory``.

    Args:
        directory: the checkpoint's, or a GGUF file.
        token_ids: the vocabulary of its tokenizer.
        special: the tokens of it that are special.

    Raises:
        DeploymentError: a file is missing or is not what it should be.
    """
    try:
        return _read(directory, token_ids, special)
    except OSError as error:
        raise DeploymentError(f"{directory}: cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DeploymentError(
            f"{directory}: its special tokens, end ids or chat template are not what they should be: {error!r}"
        ) from error


def _read(directory: Path, token_ids: Mapping[str, int], special: Mapping[str, int]) -> TextConfig:
    outer = read_json(directory / CONFIG)
    model = {**outer, **(outer.get("text_config") or {})}
    generation = read_json(directory / GENERATION, optional=True)
    tokenizer = read_json(directory / TOKENIZER, optional=True)
    tokens = _special_tokens(directory, tokenizer)
    vocab_size, max_length = model.get("vocab_size"), model.get("max_position_embeddings")
    if type(max_length) not in (int, NoneType):
        raise TypeError(f"max_position_embeddings is {max_length!r}")
    if type(vocab_size) is not int:
        vocab_size = max(token_ids.values(), default=-1) + 1
    cut = tokenizer.get("model_max_length")
    if type(cut) in (int, float) and max_length is not None and cut < max_length:
        place = f"`model_max_length` of {TOKENIZER}"
        overruled("longest sequence", f"`max_position_embeddings` {max_length}", place, cut)
    ends = end_ids(
        {
            GENERATION: generation.get("eos_token_id"),
            CONFIG: model.get("eos_token_id"),
            f"text outside `text_config` of {CONFIG}": outer.get("eos_token_id"),
            "`eos_token` of the tokenizer": token_ids.get(tokens.get("eos_token", "")),
        },
        vocab_size,
        special,
    )
    pads = {
        GENERATION: generation.get("pad_token_id"),
        CONFIG: model.get("pad_token_id"),
        "`pad_token` of the tokenizer": token_ids.get(tokens.get("pad_token", "")),
    }
    default, tool_use = read_templates(directory, tokenizer)
    response = tokenizer.get("response_template")
    if not isinstance(response, dict | None):
        raise TypeError(f"response_template is {response!r}")
    return TextConfig(
        vocab_size,
        ends,
        _pad_id(pads, vocab_size, min(ends, default=None)),
        tokens,
        default,
        max_length,
        read_sampling_defaults(generation or None, model),
        response,
        tool_use,
    )


def _special_tokens(directory: Path, tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens, by their names."""
    older = read_json(directory / "special_tokens_map.json", optional=True)
    places = [(TOKENIZER, tokenizer), ("special_tokens_map.json", older)]
    if "added_tokens_decoder" not in tokenizer:
        places.reverse()
    tokens = dict[str, str]()
    for name in _SPECIAL_TOKENS:
        said = {place: _text_of(file[name]) for place, file in places if file.get(name)}
        if said:
            tokens[name] = first_said("special tokens", said, partial(_named_text, name))
    return tokens


def _named_text(name: str, text: str) -> str:
    return f"`{name}` {text!r}"


def _text_of(token: Any) -> str:
    text = token if isinstance(token, str) else token["content"]
    if not isinstance(text, str):
        raise TypeError(f"a special token is {token!r}")
    text.encode()  # raises UnicodeEncodeError, a ValueError, for half a character
    return text


def _pad_id(places: Mapping[str, Any], vocab_size: int, otherwise: int | None) -> int | None:
    said = {place: value for place, value in places.items() if value is not None}
    for place, value in said.items():
        if type(value) is not int or not -(2**31) <= value < 2**31:
            raise TypeError(f"pad_token_id of {place} is {value!r}")
    known = {place: value for place, value in said.items() if 0 <= value < vocab_size}
    if not known:
        return otherwise
    return first_said("padding", known, str)
