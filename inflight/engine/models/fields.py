"""Checked reading of ``config.json``: each value must be of its kind, and the error names field, value and kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from inflight.errors import DeploymentError

Kind = tuple[Callable[[Any], bool], str]
"""What a value of ``config.json`` must be, as a test and in words."""
MOST = 2**31 - 1
MOST_LAYERS, MOST_EXPERTS, MOST_EXPERTS_OF_ALL = 1000, 8192, 1 << 17
"""Of a model, of a layer, and experts of all layers together: what is above takes minutes and gigabytes to build,
before the weights show whether it is meant. Published models have up to 126, 512 and 25,000."""
MOST_SIZE = 1 << 20
MOST_LENGTH = 1 << 24
"""Tokens of a sequence, where transformers' code computes it."""
_LONGEST_LIST = 4096
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Of the positive numbers that float32 holds without loss."""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


def _is_list(value: Any, kind: Kind) -> bool:
    return isinstance(value, list) and len(value) <= _LONGEST_LIST and all(map(kind[0], value))


DTYPE: Kind = (lambda value: value in ("float32", "bfloat16", "float16")), "float32, bfloat16 or float16"
FLAG: Kind = (lambda value: isinstance(value, bool)), "true or false"
SWITCH: Kind = (
    (lambda value: isinstance(value, bool) or (type(value) is int and 0 <= value <= MOST)),
    "true, false, or an integer of which 0 is false",
)
"""What transformers 4.51 wrote as an integer, and later versions write as true or false."""
COUNT: Kind = (lambda value: type(value) is int and 1 <= value <= MOST), "a positive integer below 2^31"
LENGTH: Kind = (lambda value: type(value) is int and value >= 1), "a positive integer"
SIZE: Kind = (lambda value: type(value) is int and 1 <= value <= MOST_SIZE), "a positive integer up to 2^20"
LAYERS: Kind = (
    (lambda value: type(value) is int and 1 <= value <= MOST_LAYERS),
    f"a positive integer up to {MOST_LAYERS}",
)
EXPERTS: Kind = (
    (lambda value: type(value) is int and 1 <= value <= MOST_EXPERTS),
    f"a positive integer up to {MOST_EXPERTS}",
)
INDEX: Kind = (lambda value: type(value) is int and 0 <= value <= MOST), "0 or a positive integer below 2^31"
NUMBER: Kind = (lambda value: _is_number(value) and value >= _SMALLEST), "a number above 0 that float32 holds"
AMOUNT: Kind = (lambda value: _is_number(value) and value >= 0), "0 or a number above 0 that float32 holds"
FACTORS: Kind = (lambda value: _is_list(value, NUMBER)), f"a list of numbers above 0, up to {_LONGEST_LIST}"
INDICES: Kind = (lambda value: _is_list(value, INDEX)), f"a list of layers, up to {_LONGEST_LIST}"


_NULL_MEANS = {
    "sliding_window", "attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping",
    "num_key_value_heads", "head_dim", "partial_rotary_factor", "q_lora_rank", "rope_interleave", "norm_topk_prob",
    "n_group", "topk_group", "topk_method", "first_k_dense_replace",
}  # fmt: skip
"""Fields that some class of transformers has a default for and takes null for, which is then not the default."""


class Fields:
    """The fields of one ``config.json``, or of the text part of one.

    What is null is as if it were not there, as in files that older versions of transformers wrote. But in some fields
    null means something: no window, no soft cap, as many heads of keys as of queries. There it stands in place of the
    architecture's default.
    """

    def __init__(self, data: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """``defaults``: what the architecture has where ``data`` has nothing, or a null that means nothing."""
        given = {name: value for name, value in data.items() if value is not None or name in _NULL_MEANS}
        self.data: Mapping[str, Any] = {**(defaults or {}), **given}
        """What is given or has a default."""
        self.given_names = frozenset(name for name, value in data.items() if value is not None)
        """Names of the fields that the file itself has."""

    def required(self, name: str, kind: Kind = SIZE) -> int:
        """Return an integer that must be there."""
        return int(checked(name, self.data.get(name), kind))

    def given(self, name: str, default: Any, kind: Kind) -> Any:
        """Return a value that may be left out, or null; ``default``: for an architecture that has none of its own."""
        return given(self.data, name, default, kind)


def given(data: Mapping[str, Any], name: str, default: Any, kind: Kind) -> Any:
    """Return a value that may be left out, or null."""
    return default if data.get(name) is None else checked(name, data[name], kind)


def checked(name: str, value: Any, kind: Kind) -> Any:
    """Return ``value``. Raises DeploymentError: it is not of its kind."""
    if not kind[0](value):
        raise DeploymentError(f"config.json: {name} is {value!r}; it must be {kind[1]}")
    return value
