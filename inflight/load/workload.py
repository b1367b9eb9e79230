"""The requests of a scenario: made from it and a seed, the same ones every time, byte for byte.

What arrives is a session: one request, or the turns of a conversation one after the other. Session number n is made by
its own random generator, so it does not depend on what was asked for before, or how fast. Knows nothing of servers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from inflight.client import GenerateOptions, Prompt
from inflight.gguf.checkpoint import open_gguf
from inflight.gguf.files import is_gguf
from inflight.load.arrivals import arrival_times, starts
from inflight.load.lengths import Lengths, rank_weights
from inflight.load.recordings import TraceRow, read_conversations, read_trace
from inflight.load.scenario import RequestClass, Scenario, ScenarioError

_WORD = re.compile(r"[Ġ▁]([a-z]{2,})")
"""A vocabulary's entry for a whole word: byte-level and Metaspace tokenizers mark the space before it."""
_ENOUGH = 50
"""The words to write from: with fewer, texts would often begin alike, and share cached blocks that they should not."""
TRACE = "trace"
"""Class name of a replayed trace's requests."""
_SESSIONS, _ARRIVALS, _SYSTEM, _DOCUMENTS, _BLOCKS = range(5)
"""What a random generator is for: each has its own stream of numbers."""
_TEXTS = 4096
"""Shared texts that are kept, the last used ones: a trace has any number of blocks, and each can be made again."""


class PromptWriter:
    """Writes texts that a tokenizer turns into an exact number of tokens, parts joined by spaces included.

    They are made of words that are one token each wherever they stand.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """
        Raises:
            ScenarioError: the vocabulary has too few whole words to write from.
        """
        self._tokenizer = tokenizer
        self.special_tokens = len(tokenizer.encode("").ids)
        """Tokens that the tokenizer adds to every text, such as a begin of sequence."""
        found = sorted(match[1] for name in tokenizer.get_vocab() if (match := _WORD.fullmatch(name)))
        alone = tokenizer.encode_batch(found, add_special_tokens=False)
        pairs = tokenizer.encode_batch([f"{word} {word}" for word in found], add_special_tokens=False)
        fits = [len(one.ids) == 1 and len(two.ids) == 2 for one, two in zip(alone, pairs, strict=True)]
        self._words = np.array([word for word, fit in zip(found, fits, strict=True) if fit], dtype=object)
        if len(self._words) < _ENOUGH:
            raise ScenarioError(f"the tokenizer has {len(self._words)} whole words; {_ENOUGH} are needed for prompts")

    @classmethod
    def of_checkpoint(cls, model: Path) -> PromptWriter:
        """Return the writer for a checkpoint, or a GGUF file. Raises ScenarioError: its tokenizer cannot be read."""
        path = model / "tokenizer.json"
        try:
            content = open_gguf(model).read(path.name) if is_gguf(model) else path.read_bytes()
            tokenizer = Tokenizer.from_buffer(content or b"")
        except Exception as error:  # the library raises nothing narrower
            raise ScenarioError(f"{path}: cannot be read: {error}") from None
        return cls(tokenizer)

    def write(self, tokens: int, generator: np.random.Generator) -> str:
        """Return a text of ``tokens`` tokens, special ones not counted; joined to another by a space, the sum."""
        return " ".join(self._words[generator.integers(len(self._words), size=max(tokens, 0))])

    def count(self, text: str) -> int:
        """Return the tokens of any text, special ones not counted."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request says anew, and how it is answered."""

    text: str
    max_tokens: int
    think_s: float = 0.0
    """Time from the answer before it to its sending."""
    cancel_after_tokens: int | None = None
    cancel_after_s: float | None = None
    """Time from its sending to the cancellation."""


@dataclass(frozen=True, slots=True)
class Session:
    """One request, or the turns of one conversation."""

    number: int
    class_name: str
    turns: tuple[Turn, ...]
    system: str = ""
    as_messages: bool = False
    """A chat for the chat template; else one plain text."""
    priority: int | None = None
    client_id: str | None = None
    ignore_eos: bool = True

    def prompt(self, turn: int, answers: Sequence[str]) -> Prompt:
        """Return the prompt of a turn: all that was said before, ``answers`` the server's own, and the turn's text."""
        asked = [one.text for one in self.turns[: turn + 1]]
        if not self.as_messages:
            history = [part for pair in zip(asked[:-1], answers, strict=True) for part in pair]
            return _join(self.system, *history, asked[-1])
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for ask, answer in zip(asked[:-1], answers, strict=True):
            messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": asked[-1]}]

    def options(self, turn: int) -> GenerateOptions:
        """Return the options of a turn's request, with all that measuring it needs."""
        return GenerateOptions(
            max_tokens=self.turns[turn].max_tokens,
            ignore_eos=self.ignore_eos or None,
            priority=self.priority,
            client_id=self.client_id,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
            final_perf_metrics=True,
        )


class Workload:
    """The sessions of a scenario, by number, and the times at which they arrive."""

    def __init__(self, scenario: Scenario, writer: PromptWriter, seed: int | None = None) -> None:
        """``seed`` takes the place of the scenario's. Raises ScenarioError: a file of the scenario cannot be used."""
        self.scenario = scenario
        self.seed = scenario.seed if seed is None else seed
        self._writer = writer
        # A text that several prompts have is the same one every time.
        self._shared = lru_cache(_TEXTS)(lambda tokens, *purpose: writer.write(tokens, self._generator(*purpose)))
        self._weights = np.cumsum([one.weight for one in scenario.classes])
        self._trace = read_trace(scenario.trace.path) if scenario.trace else []
        self._recorded = {
            one.name: read_conversations(one.conversations.path, one.conversations.max_turns)
            for one in scenario.classes
            if one.conversations
        }
        if (trace := scenario.trace) is None:
            return
        if self.duration_s <= 0:
            raise ScenarioError(f"{trace.file}: its first and last request are at the same time")
        if trace.ramp_up_s >= self.duration_s:
            raise ScenarioError(f"`trace.ramp_up_s` is {trace.ramp_up_s:g}: the replay takes {self.duration_s:g} s")

    @cached_property
    def arrivals(self) -> list[float]:
        """When each session of an open loop arrives, in seconds from the begin; a closed loop has no such times."""
        if self.scenario.trace is not None:
            return [row.timestamp / 1000 * self.scenario.trace.time_scale for row in self._trace]
        return arrival_times(self.scenario.phases, self._generator(_ARRIVALS)) if self.scenario.open else []

    @property
    def steady(self) -> tuple[float, float]:
        """Begin and end of the measured window, in seconds from the begin of the load."""
        trace = self.scenario.trace
        return self.scenario.steady if trace is None else (trace.ramp_up_s, self.duration_s)

    @property
    def duration_s(self) -> float:
        """How long sessions are started, in seconds; of a trace, to the last request and one mean gap more."""
        if self.scenario.trace is None:
            return starts(self.scenario.phases)[-1]
        return self.arrivals[-1] * len(self.arrivals) / max(1, len(self.arrivals) - 1)

    def session(self, number: int) -> Session:
        """Return session ``number``, from 0; of a trace, there are as many as ``arrivals``."""
        if self._trace:
            return self._replayed(number, self._trace[number])
        generator = self._generator(_SESSIONS, number)
        drawn = np.searchsorted(self._weights, generator.random() * self._weights[-1], "right")
        place = min(int(drawn), len(self._weights) - 1)
        kind, system = self.scenario.classes[place], ""
        if kind.name in self._recorded:
            recorded = self._recorded[kind.name][int(generator.integers(len(self._recorded[kind.name])))]
            system, said = recorded.system, enumerate(recorded.turns)
            turns = [self._turn(kind, turn, ask, generator, answer) for turn, (ask, answer) in said]
        else:
            turns = self._made(kind, place, generator)
        if kind.system_prompt is not None:
            variant = int(generator.integers(kind.system_prompt.variants))
            system = _join(self._shared(kind.system_prompt.tokens, _SYSTEM, place, variant), system)
        return Session(
            number,
            kind.name,
            tuple(turns),
            system=system,
            as_messages=kind.format == "messages",
            priority=kind.priority,
            client_id=kind.client_id,
            ignore_eos=kind.ignore_eos,
        )

    def _generator(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *purpose])

    def _made(self, kind: RequestClass, place: int, generator: np.random.Generator) -> list[Turn]:
        """Return the turns of a session of made-up texts."""
        assert kind.prompt_tokens is not None, "validated"
        count = max(1, kind.turns.count.draw(generator)) if kind.turns else 1
        turns = []
        for number in range(count):
            special = 0 if number else self._writer.special_tokens
            own = self._writer.write(max(1, kind.prompt_tokens.draw(generator) - special), generator)
            turns.append(self._turn(kind, number, _join(self._documents(kind, place, generator), own), generator))
        return turns

    def _turn(
        self, kind: RequestClass, number: int, text: str, generator: np.random.Generator, answer: str = ""
    ) -> Turn:
        drawn = kind.output_tokens.draw(generator) if kind.output_tokens else self._writer.count(answer)
        think = kind.turns.think_ms if kind.turns and number else None
        tokens = milliseconds = None
        if kind.cancellations is not None and generator.random() < kind.cancellations.share:
            milliseconds = _draw(kind.cancellations.after_ms, generator)
            tokens = _draw(kind.cancellations.after_tokens, generator)
        seconds = None if milliseconds is None else milliseconds / 1000
        return Turn(text, max(1, drawn), (_draw(think, generator) or 0) / 1000, tokens, seconds)

    def _documents(self, kind: RequestClass, place: int, generator: np.random.Generator) -> str:
        """Return the documents of one prompt, the likeliest ones most often, none twice."""
        documents = kind.documents
        if documents is None:
            return ""
        weights = rank_weights(documents.count, documents.skew)
        drawn = generator.choice(documents.count, documents.per_request, replace=False, p=weights).tolist()
        lengths = [documents.tokens.draw(self._generator(_DOCUMENTS, place, rank, 1)) for rank in drawn]
        return _join(*(self._shared(n, _DOCUMENTS, place, rank) for n, rank in zip(lengths, drawn, strict=True)))

    def _replayed(self, number: int, row: TraceRow) -> Session:
        """Return a request of a trace: equal hash ids become equal words, what has no id is its own."""
        assert self.scenario.trace is not None
        size, rest = self.scenario.trace.block_tokens, row.input_length - self._writer.special_tokens
        parts = []
        for block in row.hash_ids[: -(-rest // size)]:
            words = self._shared(size, _BLOCKS, block).split(" ")
            parts.append(" ".join(words[: min(size, rest)]))
            rest -= size
        own = self._writer.write(rest, self._generator(_SESSIONS, number)) if rest > 0 else ""
        return Session(number, TRACE, (Turn(_join(*parts, own), row.output_length),))


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _draw(lengths: Lengths | None, generator: np.random.Generator) -> int | None:
    return None if lengths is None else lengths.draw(generator)
