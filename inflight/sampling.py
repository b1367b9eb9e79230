"""SamplingParams: everything a request says about how its tokens are chosen and when it ends, validated once.

This module knows nothing of tensors, Triton or torch: the stages read a request's tensors into it at the edge, and all
that lies behind trusts it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, cast, get_args

import numpy as np

from inflight.errors import InvalidRequest

_MOST_LENGTH_PENALTY = 50

MAX_SEED = 2**64 - 1
MAX_TOP_LOG_PROBS = 20

GuideKind = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag", "lark_grammar", "choice"]
_JSON_GUIDES = ("json_schema", "structural_tag", "choice")
"""The kinds whose text is JSON."""
MAX_GUIDE_START_IDS = 64
Pooling = Literal["last", "mean"]
TENSOR_OF = {
    "log_probs": "return_log_probs",
    "top_log_probs": "num_top_log_probs",
    "prompt_log_probs": "num_prompt_log_probs",
    "log_prob_ids": "log_prob_token_ids",
    "context_logits": "return_context_logits",
    "generation_logits": "return_generation_logits",
    "logit_bias": "embedding_bias",
    "bad_sequences": "bad_words_list",
    "stop_sequences": "stop_words_list",
    "guide": "guided_decoding_guide_type",
    "length_penalty": "len_penalty",
}
"""The fields of SamplingParams that the engine stage calls by another name."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; the hook of Python's reader, which would take the last of equal keys.

    Raises:
        ValueError: naming a key that comes twice.
    """
    made = dict[str, Any]()
    for key, value in pairs:
        if key in made:
            raise ValueError(f"it has the key {key[:100]!r} twice in one object")
        made[key] = value
    return made


@dataclass(frozen=True, slots=True)
class Guide:
    """What the generated text must be: any JSON, or what a schema, an expression, a grammar, tags or choices say."""

    kind: GuideKind
    text: str = ""
    start_ids: tuple[int, ...] = ()
    """The guide holds only behind these generated tokens, which must come one after the other; (): from the start."""

    @classmethod
    def read(cls, kind: str | None, text: str | None, start_ids: tuple[int, ...] = ()) -> Guide | None:
        """Return the guide that a request's tensors say, or None for none.

        Raises:
            InvalidRequest: naming the tensor.
        """
        if kind is None:
            _require(text is None, "guided_decoding_guide_type", None, "given with guided_decoding_guide")
            _require(not start_ids, "guided_decoding_guide_type", None, "given with guide_start_ids")
            return None
        name, kinds = "guided_decoding_guide", get_args(GuideKind)
        _require(kind in kinds, f"{name}_type", repr(kind), f"one of {', '.join(kinds)}")
        _require(bool(text) != (kind == "json"), name, repr(text or ""), "given, or for the type json left out")
        limit = f"{MAX_GUIDE_START_IDS} at most"
        _require(len(start_ids) <= MAX_GUIDE_START_IDS, "guide_start_ids: the number of ids", len(start_ids), limit)
        if kind in _JSON_GUIDES:
            try:
                json.loads(text or "", object_pairs_hook=unique_keys)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"{name} is not valid JSON: {error}") from None
        return cls(cast(GuideKind, kind), text or "", start_ids)


@dataclass(frozen=True)
class SamplingParams:
    """How one sequence is sampled.

    A request samples when ``temperature`` is above zero and ``top_k`` is not 1; otherwise it is greedy. With neither
    given, the contract's defaults make it greedy (``temperature`` None).

    Raises:
        InvalidRequest: on construction, naming the field, its value and the limit.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float | None = None
    """None or 0: greedy."""
    top_k: int = 0
    """0: all tokens. 1: greedy."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ignore_length: int = 0
    """How many tokens of the prompt, from its start, presence and frequency penalties leave out; the longest: all."""
    seed: int | None = None
    """None: the engine draws one per request."""
    beam_width: int = 1
    """Beams of beam search; 1: there is no search."""
    length_penalty: float = 0.0
    """A beam's score is its log-prob over its length to this power: above 0 favours long ones, below 0 short ones."""
    early_stopping: bool = True
    """Whether the search is over as soon as there are ``beam_width`` finished beams, good or bad."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence; none of them appears in its text."""
    ignore_eos: bool = False
    stop_strings: tuple[str, ...] = ()
    """Matched on text, across token borders; the text ends before the match."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Matched on token ids; the matched tokens stay in the output, as upstream has it."""
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id to the value added to its logit."""
    guide: Guide | None = None
    """What the generated text must be; None: anything."""
    log_probs: bool = False
    top_log_probs: int = 0
    """How many of the most likely tokens to report at each position, at most 20."""
    log_prob_ids: tuple[int, ...] = ()
    """Tokens whose log-probs to report at each position."""
    prompt_log_probs: int | None = None
    """Report the log-prob of each token of the prompt but the first, and so many of the most likely ones, at most 20;
    None: do not."""
    pooling: Pooling | None = None
    """Generate nothing, and return the hidden state of the prompt's last token, or the mean of all tokens'."""
    context_logits: bool = False
    generation_logits: bool = False

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        limit = f"between 0 and max_tokens ({self.max_tokens})"
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, limit)
        if self.temperature is not None:
            _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "a finite number, at least 0")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0 (0: all tokens)")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        penalty = self.repetition_penalty
        _require(0 < penalty < math.inf, "repetition_penalty", penalty, "a finite number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(math.isfinite(value), name, value, "a finite number")
        length = self.prompt_ignore_length
        _require(length >= 0, "prompt_ignore_length", length, "at least 0")
        if self.seed is not None:
            _require(0 <= self.seed <= MAX_SEED, "seed", self.seed, "an unsigned 64-bit integer")
        number = self.top_log_probs
        _require(0 <= number <= MAX_TOP_LOG_PROBS, "num_top_log_probs", number, f"between 0 and {MAX_TOP_LOG_PROBS}")
        if (asked := self.prompt_log_probs) is not None:
            limit = f"between 0 and {MAX_TOP_LOG_PROBS}"
            _require(0 <= asked <= MAX_TOP_LOG_PROBS, "num_prompt_log_probs", asked, limit)
        if self.pooling is not None:
            _require(self.pooling in get_args(Pooling), "pooling", repr(self.pooling), " or ".join(get_args(Pooling)))
        if any(map(math.isnan, self.logit_bias.values())):  # there may be one for each token of the vocabulary
            wrong = next({token: bias} for token, bias in self.logit_bias.items() if math.isnan(bias))
            _require(False, "embedding_bias", wrong, "numbers")
        _require(self.beam_width >= 1, "beam_width", self.beam_width, "at least 1")
        penalty = self.length_penalty
        # Beyond it the power of a long beam's length is no number; transformers' users take -1 to 2.
        _require(abs(penalty) <= _MOST_LENGTH_PENALTY, "length_penalty", penalty, f"within ±{_MOST_LENGTH_PENALTY}")
        # One beam is never weighed against another; 1 is what old clients send for none.
        of_one = self.beam_width == 1 and penalty not in (0.0, 1.0)
        _require(not of_one, "length_penalty", penalty, "0 or 1 where beam_width is 1")

    @cached_property
    def bias_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """``logit_bias`` as token ids, int64 [n], and what is added to their logits, float64 [n]."""
        return np.array(list(self.logit_bias), np.int64), np.array(list(self.logit_bias.values()), np.float64)

    @cached_property
    def stop_sequences_by_last(self) -> dict[int, list[tuple[int, ...]]]:
        """``stop_sequences`` by their last token: a step looks at those alone that its token can end."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for stop in self.stop_sequences:
            found.setdefault(stop[-1], []).append(stop)
        return found

    @cached_property
    def bad_sequences_by_previous(self) -> dict[int | None, list[tuple[int, ...]]]:
        """``bad_sequences`` by their last token but one, which a step has seen; None: they have one token."""
        found: dict[int | None, list[tuple[int, ...]]] = {}
        for bad in self.bad_sequences:
            found.setdefault(bad[-2] if len(bad) > 1 else None, []).append(bad)
        return found

    @cached_property
    def reads_prompt(self) -> bool:
        """Whether each of the prompt's positions must be computed, cached or not."""
        return self.context_logits or self.prompt_log_probs is not None or self.pooling == "mean"

    @cached_property
    def greedy(self) -> bool:
        """Whether the most likely token is taken at each step."""
        return not self.temperature or self.top_k == 1


def asked_beside(sampling: SamplingParams, known: Iterable[str]) -> list[str]:
    """Return the tensors that a request sets beside the fields ``known``: those whose values are not the defaults."""
    plain = SamplingParams(sampling.max_tokens)
    names = [part.name for part in fields(SamplingParams) if getattr(sampling, part.name) != getattr(plain, part.name)]
    return [TENSOR_OF.get(name, name) for name in names if name not in known]


def _require(holds: bool, name: str, value: object, limit: str) -> None:
    if not holds:
        raise InvalidRequest(f"{name} is {value}; it must be {limit}")
