"""``prompt`` of /v1/completions and ``input`` of /v1/embeddings: texts or token ids, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.gateway.context import Gateway
from inflight.gateway.errors import invalid
from inflight.gateway.sampling import encode_texts
from inflight.gateway.values import wrong
from inflight.json_text import shown

MOST_PROMPTS = 1024
_WANTED = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt."""

    ids: list[int]
    param: str
    """Its path in the request."""
    text: str | None = None
    """As it was given; None: as token ids."""


def read_prompts(
    value: Any,
    gateway: Gateway,
    *,
    add_special_tokens: bool,
    param: str = "prompt",
    most: int = MOST_PROMPTS,
    tokens: int | None = None,
) -> list[Prompt]:
    """Return the prompts of a request, which its field ``param`` has, at most ``most``.

    A text that certainly has more than ``tokens`` (None: any number) is refused before it is encoded to its end.

    Raises:
        ApiError: 400, naming the prompt by its path.
    """
    if isinstance(value, str):
        [ids] = encode_texts(gateway, [value], param, add_special_tokens=add_special_tokens, most=tokens)
        return [Prompt(ids, param, value)]
    if not isinstance(value, list) or not value:
        raise wrong(param, value, _WANTED)
    if all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        return [_ids(value, param, gateway)]
    if len(value) > most:
        raise invalid(f"{param} has {len(value)} prompts; the limit is {most}", param)
    if all(isinstance(one, str) for one in value):
        encoded = encode_texts(gateway, value, param, add_special_tokens=add_special_tokens, most=tokens)
        given = enumerate(zip(encoded, value, strict=True))
        return [Prompt(ids, f"{param}[{index}]", text) for index, (ids, text) in given]
    if all(isinstance(one, list) for one in value):
        return [_ids(one, f"{param}[{index}]", gateway) for index, one in enumerate(value)]
    raise invalid(f"{param} has {shown(value)}; it must be {_WANTED}", param)


def _ids(value: Sequence[Any], path: str, gateway: Gateway) -> Prompt:
    size = gateway.tokenizer.config.vocab_size
    for index, one in enumerate(value):
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < size:
            raise wrong(f"{path}[{index}]", one, f"a token id from 0 to {size - 1}")
    return Prompt(list(value), path)
