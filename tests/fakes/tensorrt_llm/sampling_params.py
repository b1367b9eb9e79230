"""``SamplingParams`` and ``GuidedDecodingParams``: the recorded fields, and the rules between them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

import torch

from tensorrt_llm.tables import LLM_API, _literal


def _columns(name: str) -> list[tuple[str, Any, Any]]:
    return [(one["name"], Any, field(default=_literal(one["default"]))) for one in LLM_API[name]["fields"]]


class _GuideRules:
    def _validate(self) -> None:
        guides = sum(bool(getattr(self, one.name)) for one in fields(self))  # type: ignore[arg-type]
        if guides > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {guides}.")


GuidedDecodingParams = make_dataclass(
    "GuidedDecodingParams", _columns("GuidedDecodingParams"), bases=(_GuideRules,), kw_only=True
)


@dataclass(kw_only=True)
class _Hidden:
    _bad_word_ids: list[list[int]] | None = field(default=None, init=False, repr=False)


class _Rules(_Hidden):
    __slots__ = ()

    def __post_init__(self: Any) -> None:
        self.best_of = self.best_of or self.n
        self.pad_id = self.end_id if self.pad_id is None else self.pad_id
        if self.embedding_bias is not None:
            self.embedding_bias = torch.tensor(self.embedding_bias, dtype=torch.float32)
        for name, low, high in (("top_p", 0, 1), ("top_k", 0, None), ("temperature", 0, None)):
            value = getattr(self, name)
            if value is not None and (value < low or (high is not None and value > high)):
                raise ValueError(f"require {low} <= {name}, got {name}={value}")
        if self.best_of > 1 and self.greedy:
            raise ValueError("Greedy decoding in the LLM API does not allow multiple returns.")
        if self.guided_decoding is not None:
            if not isinstance(self.guided_decoding, GuidedDecodingParams):
                raise TypeError("guided_decoding must be GuidedDecodingParams")
            self.guided_decoding._validate()

    @property
    def greedy(self: Any) -> bool:
        """Whether nothing is drawn."""
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return unset or self.top_k == 1 or self.top_p == 0.0 or self.temperature == 0

    def bad_words(self: Any) -> list[list[int]]:
        """Return the bad words as token ids."""
        words = [[token] for token in self.bad_token_ids or []]
        if self.bad is None:
            return words
        if self._bad_word_ids is None:
            raise RuntimeError("bad is not processed by tokenizer, please call the setup method.")
        return words + self._bad_word_ids


SamplingParams = make_dataclass("SamplingParams", _columns("SamplingParams"), bases=(_Rules,), kw_only=True)
