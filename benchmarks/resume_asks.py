"""The streams of the benchmark `resume`: what is asked, chosen by a seed, and what came of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from inflight.client import Completion, GenerateOptions

GRPC, HTTP, OPENAI = PROTOCOLS = ("gRPC", "HTTP", "OpenAI")
GREEDY, SAMPLED = "greedy", "sampled"
_PROMPTS = (
    "What is in-flight batching?",
    "Erzähle von Zügen, Bücherwürmern und süßen Äpfeln.",
    "請用繁體中文解釋什麼是分頁式快取。",
    "Объясни, что такое токен 🙂🚂",
    "شرح الذاكرة المؤقتة",
    "नमस्ते, कैश क्या है?",
)
_FEATURES: tuple[GenerateOptions, ...] = (
    GenerateOptions(),
    GenerateOptions(return_log_probs=True, num_top_log_probs=3),
    GenerateOptions(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25, return_log_probs=True),
    GenerateOptions(stop_words=["zq", " the end", "\n\n\n"], min_tokens=200),
    GenerateOptions(num_return_sequences=2, return_log_probs=True),
    GenerateOptions(bad_words=["e"], top_k=40, min_tokens=200, ignore_eos=None),
)


@dataclass
class Ask:
    """One stream: what is asked, and what came of it."""

    number: int
    options: GenerateOptions
    answer: Completion | None = None
    began: bool = False
    """Whether tokens of it have come."""
    over: bool = False
    """Whether it has come to its end."""
    breaks: int = 0
    """How often it was broken while it ran; of OpenAI's streams, how often their engine was killed then."""
    error: str = ""

    @property
    def whole(self) -> bool:
        """Whether its answer came in one run."""
        return self.answer is not None and not self.breaks

    @property
    def prompt(self) -> str:
        return _PROMPTS[self.number % len(_PROMPTS)]

    @property
    def protocol(self) -> str:
        return PROTOCOLS[self.number // len(_PROMPTS) % len(PROTOCOLS)]

    @property
    def sampling(self) -> str:
        return SAMPLED if self.options.temperature else GREEDY

    def place(self, servers: int) -> int:
        """Return which of so many servers has the gateway that it asks, if it is one of OpenAI's."""
        return self.number % servers

    def body(self, model: str) -> dict[str, Any]:
        """Return it as a request of OpenAI's API."""
        options = self.options
        fields = {
            "max_tokens": options.max_tokens,
            "min_tokens": options.min_tokens,
            "ignore_eos": options.ignore_eos,
            "temperature": options.temperature or 0.0,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "seed": options.seed,
            "n": options.num_return_sequences,
            "stop": options.stop_words,
            "bad_words": options.bad_words,
            "repetition_penalty": options.repetition_penalty,
            "presence_penalty": options.presence_penalty,
            "frequency_penalty": options.frequency_penalty,
            "logprobs": (options.num_top_log_probs or 0) if options.return_log_probs else None,
        }
        asked = {name: value for name, value in fields.items() if value is not None}
        return {"model": model, "prompt": self.prompt, **asked}

    def unbroken(self) -> Ask:
        """Return the request that gives the same answer: with the seed that the server has told, if it chose one."""
        if self.answer is None or self.answer.used_seed is None or self.options.seed is not None:
            return Ask(self.number, self.options)
        return Ask(self.number, replace(self.options, seed=self.answer.used_seed))


def make_asks(first: int, count: int, seed: int) -> list[Ask]:
    """Return so many streams, chosen by the seed; ``first`` is the number of the first."""
    rng = random.Random(f"{seed} {first}")
    asks = []
    for number in range(first, first + count):
        options = replace(_FEATURES[rng.randrange(len(_FEATURES))], max_tokens=rng.randrange(400, 800))
        options = replace(options, return_num_input_tokens=True, return_num_output_tokens=True)
        if options.stop_words is None and rng.random() < 0.9:
            options = replace(options, ignore_eos=True)
        elif options.min_tokens is None:  # long enough to meet a kill
            options = replace(options, min_tokens=200)
        kind = number % 3  # greedy, sampled by a seed, and by one that the server chooses
        if kind:
            options = replace(options, temperature=rng.choice([0.7, 1.0, 1.3]), top_p=rng.choice([0.9, None]))
        ask = Ask(number, options)
        if kind == 1 or (kind == 2 and ask.protocol == OPENAI):  # an answer of OpenAI's does not tell its seed
            ask.options = replace(options, seed=rng.getrandbits(64))
        elif kind == 2:
            ask.options = replace(options, num_return_sequences=None)  # each of several has a seed of its own
        asks.append(ask)
    return asks
