"""What the soak of a server asks: every feature, lengths as random as users' are, and clients that leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from inflight.client.request import GenerateOptions, Prompt, Request, build_request

_WORDS = (
    "What is a paged cache, and why does batching help when prompts have many lengths? The engine reads tokens, the "
    "server sends them, a client waits; latency, memory, queue, stream, block, prefix, schedule and step are words "
    "that answers use. Überraschung, 你好, naïve, emoji 🙂 and code like f(x) = x**2 come too."
).split()
_FEW_WORDS, _MEDIAN_WORDS, _MOST_WORDS = 10, 60, 900
_MEDIAN_TOKENS, _MOST_TOKENS = 40, 200
_SIGMA = 1.1
"""Of the logarithms of lengths: many short ones and a long tail."""
_SHARED = 20
"""Beginnings that prompts have in common."""
_SHARES, _LEAVES, _STREAMS, _OVER_GRPC = 0.3, 0.25, 0.85, 0.5
"""Probabilities: of such a beginning, of a client that leaves, of a stream, and of gRPC."""
_LONGEST_STAY_S = 1.5
_SLOW = 0.05
"""Probability of a client that reads slowly."""

Draw = Callable[[np.random.Generator], dict[str, Any]]


@dataclass(frozen=True)
class Ask:
    """One request, and what its client will do."""

    kind: str
    over: str
    """grpc or http."""
    request: Request
    leaves: str = ""
    """"closes" its call or connection, or "stops" it by its id; empty: it reads to the end."""
    stays_s: float = 0.0
    """How long it stays, if it leaves."""
    reads_slowly: bool = False
    """Whether it waits between the chunks that it reads."""

    @property
    def is_refused(self) -> bool:
        """Whether the server has to refuse it."""
        return self.kind == REFUSED


REFUSED = "refused"
_MALFORMED: tuple[dict[str, Any], ...] = (
    {"temperature": -1.0},
    {"top_p": 2.0},
    {"max_tokens": 0},
    {"beam_width": 100_000},
    {"lora_name": "nobody's"},
    {"guided_decoding_guide_type": "no such"},
)
_KINDS: dict[str, Draw] = {
    "plain": lambda _: {},
    "chat": lambda _: {},
    "sampled": lambda draw: {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": int(draw.integers(2**31))},
    "penalties": lambda _: {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "log probs": lambda draw: {"return_log_probs": True, "num_top_log_probs": int(draw.integers(1, 6))},
    "sequences": lambda draw: {
        "num_return_sequences": int(draw.integers(2, 5)),
        "temperature": 1.0,
        "return_log_probs": bool(draw.random() < 0.5),
    },
    "beams": lambda draw: {"beam_width": int(draw.integers(2, 5)), "return_log_probs": True},
    "stop words": lambda _: {"stop_words": ["the", ". ", "batch"]},
    "bad words": lambda _: {"bad_words": ["memory", "the"]},
    "priority": lambda draw: {"priority": int(draw.integers(0, 4))},
    "deadline": lambda draw: {"deadline_ms": int(draw.integers(1, 1500))},
    "logits": lambda _: {},
    REFUSED: lambda draw: dict(_MALFORMED[draw.integers(len(_MALFORMED))]),
}
KINDS = tuple(_KINDS)


@dataclass
class Traffic:
    """Draws requests, all from one seed."""

    seed: int
    _generator: np.random.Generator = field(init=False)
    _beginnings: list[str] = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.seed)
        self._beginnings = [self._text(100) for _ in range(_SHARED)]

    def draw(self) -> Ask:
        """Return the next request."""
        draw = self._generator
        self._count += 1
        kind = KINDS[draw.integers(len(KINDS))]
        wanted: dict[str, Any] = {"max_tokens": self._length(_MEDIAN_TOKENS, _MOST_TOKENS)}
        if kind == "logits":
            wanted["max_tokens"] = min(wanted["max_tokens"], 8)
        options = GenerateOptions(**(wanted | _KINDS[kind](draw)))
        streams = kind != "beams" and draw.random() < _STREAMS
        # Ids that nobody else has: `stop` ends all that share one.
        name = f"soak-{self.seed}-{self._count}"
        request = build_request(self._prompt(kind), options, stream=streams, request_id=name, trace_context={})
        if kind == "logits":
            tensors: dict[str, list[Any]] = {"return_context_logits": [True], "return_generation_logits": [True]}
            request = replace(request, inputs=request.inputs | tensors)
        leaves = "" if kind == REFUSED or draw.random() > _LEAVES else str(draw.choice(["closes", "stops"]))
        over = "grpc" if draw.random() < _OVER_GRPC else "http"
        slow = not leaves and draw.random() < _SLOW
        return Ask(kind, over, request, leaves, float(draw.random() ** 2 * _LONGEST_STAY_S), slow)

    def _prompt(self, kind: str) -> Prompt:
        if kind == "logits":  # a row for each token of the prompt: as JSON, many megabytes
            return self._text(self._length(_FEW_WORDS / 2, _FEW_WORDS))
        text = self._text(self._length(_MEDIAN_WORDS, _MOST_WORDS))
        if self._generator.random() < _SHARES:
            text = f"{self._beginnings[self._generator.integers(_SHARED)]} {text}"
        return [{"role": "user", "content": text}] if kind == "chat" else text

    def _text(self, words: int) -> str:
        return " ".join(self._generator.choice(_WORDS, words).tolist())

    def _length(self, median: float, most: int) -> int:
        return int(np.clip(np.round(self._generator.lognormal(np.log(median), _SIGMA)), 1, most))
