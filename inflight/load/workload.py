"""The requests of a scenario: made from it and a seed, the same ones every time, byte for byte.

What arrives is a session: one request, or the turns of a conversation one after the other. Session number n is made by
its own random generator, so it does not depend on what was asked for before, or how fast. Knows nothing of servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from inflight.client import GenerateOptions, Prompt
from inflight.load.arrivals import arrival_times, starts
from inflight.load.conversations import Recorded, read_conversations
from inflight.load.lengths import Lengths, rank_weights
from inflight.load.prompts import PromptWriter, join
from inflight.load.scenario import RequestClass, Scenario, ScenarioError, Trace
from inflight.load.traces import TraceRow, read_trace

TRACE = "trace"
"""Class name of a replayed trace's requests."""
_SESSIONS, _ARRIVALS, _SYSTEM, _DOCUMENTS, _BLOCKS = range(5)
"""What a random generator is for: each has its own stream of numbers."""
_TEXTS = 4096
"""Shared texts that are kept, the last used ones: a trace has any number of blocks, and each can be made again."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request says anew, and how it is answered."""

    text: str
    max_tokens: int
    think_s: float = 0.0
    """From the answer before it to its sending."""
    cancel_after_tokens: int | None = None
    cancel_after_s: float | None = None
    """From its sending."""


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
            return join(self.system, *history, asked[-1])
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
        """
        Args:
            scenario: what to make.
            writer: makes texts to a length.
            seed: in place of the scenario's.

        Raises:
            ScenarioError: a file of the scenario cannot be used.
        """
        self.scenario = scenario
        self.seed = scenario.seed if seed is None else seed
        self._writer = writer
        self._shared = lru_cache(maxsize=_TEXTS)(self._write_shared)
        self._trace = read_trace(scenario.trace.path) if scenario.trace else []
        self._recorded = {
            one.name: read_conversations(one.conversations.path, one.conversations.max_turns)
            for one in scenario.classes
            if one.conversations
        }
        if scenario.trace is not None:
            self._check_times(scenario.trace)

    def _check_times(self, trace: Trace) -> None:
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
        classes = self.scenario.classes
        place = np.searchsorted(np.cumsum([one.weight for one in classes]), generator.random() * self._weight, "right")
        return self._session(number, min(int(place), len(classes) - 1), generator)

    @cached_property
    def _weight(self) -> float:
        return sum(one.weight for one in self.scenario.classes)

    def _generator(self, *purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *purpose])

    def _session(self, number: int, place: int, generator: np.random.Generator) -> Session:
        kind = self.scenario.classes[place]
        if kind.name in self._recorded:
            recorded = self._recorded[kind.name][int(generator.integers(len(self._recorded[kind.name])))]
            system, turns = self._said_again(kind, recorded, generator)
        else:
            system, turns = "", self._made(kind, place, generator)
        return Session(
            number,
            kind.name,
            turns,
            system=join(self._system(kind, place, generator), system),
            as_messages=kind.format == "messages",
            priority=kind.priority,
            client_id=kind.client_id,
            ignore_eos=kind.ignore_eos,
        )

    def _system(self, kind: RequestClass, place: int, generator: np.random.Generator) -> str:
        if kind.system_prompt is None:
            return ""
        variant = int(generator.integers(kind.system_prompt.variants))
        return self._shared(kind.system_prompt.tokens, _SYSTEM, place, variant)

    def _made(self, kind: RequestClass, place: int, generator: np.random.Generator) -> tuple[Turn, ...]:
        """Return the turns of a session of made-up texts."""
        assert kind.prompt_tokens is not None, "validated"
        count = max(1, kind.turns.count.draw(generator)) if kind.turns else 1
        turns = []
        for number in range(count):
            special = 0 if number else self._writer.special_tokens
            own = self._writer.write(max(1, kind.prompt_tokens.draw(generator) - special), generator)
            turns.append(self._turn(kind, number, join(self._documents(kind, place, generator), own), generator))
        return tuple(turns)

    def _said_again(
        self, kind: RequestClass, recorded: Recorded, generator: np.random.Generator
    ) -> tuple[str, tuple[Turn, ...]]:
        """Return the system prompt and the turns of a recorded conversation."""
        turns = [
            self._turn(kind, number, ask, generator, answer) for number, (ask, answer) in enumerate(recorded.turns)
        ]
        return recorded.system, tuple(turns)

    def _turn(
        self, kind: RequestClass, number: int, text: str, generator: np.random.Generator, answer: str = ""
    ) -> Turn:
        drawn = kind.output_tokens.draw(generator) if kind.output_tokens else self._writer.count(answer)
        think = kind.turns.think_ms if kind.turns and number else None
        tokens, seconds = _cancellation(kind, generator)
        return Turn(text, max(1, drawn), (_draw(think, generator) or 0) / 1000, tokens, seconds)

    def _documents(self, kind: RequestClass, place: int, generator: np.random.Generator) -> str:
        """Return the documents of one prompt, the likeliest ones most often, none twice."""
        documents = kind.documents
        if documents is None:
            return ""
        weights = rank_weights(documents.count, documents.skew)
        drawn = generator.choice(documents.count, documents.per_request, replace=False, p=weights).tolist()
        lengths = [documents.tokens.draw(self._generator(_DOCUMENTS, place, rank, 1)) for rank in drawn]
        return join(*(self._shared(n, _DOCUMENTS, place, rank) for n, rank in zip(lengths, drawn, strict=True)))

    def _write_shared(self, tokens: int, *purpose: int) -> str:
        """Return a text that several prompts have: the same one every time."""
        return self._writer.write(tokens, self._generator(*purpose))

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
        return Session(number, TRACE, (Turn(join(*parts, own), row.output_length),))


def _cancellation(kind: RequestClass, generator: np.random.Generator) -> tuple[int | None, float | None]:
    """Return after how many tokens or seconds a request is cancelled; both None: it is not."""
    cancellations = kind.cancellations
    if cancellations is None or generator.random() >= cancellations.share:
        return None, None
    milliseconds = _draw(cancellations.after_ms, generator)
    return _draw(cancellations.after_tokens, generator), None if milliseconds is None else milliseconds / 1000


def _draw(lengths: Lengths | None, generator: np.random.Generator) -> int | None:
    return None if lengths is None else lengths.draw(generator)
