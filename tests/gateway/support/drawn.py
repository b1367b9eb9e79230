"""An engine whose outputs a property draws: it ends, hides and cuts them as the real one does, in any chunking."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from inflight.client.errors import ServerUnreachable
from inflight.errors import InflightError
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.gateway.resuming import ResumingEngine, Resumption
from inflight.text.stops import StopTextLimit
from inflight.text.tokenizer import Tokenizer
from tests.gateway.support.gateways import Inside
from tests.gateway.support.scripted import served_by


@dataclass
class Drawn:
    """What the engine generates for the next requests, whatever they ask."""

    outputs: Sequence[Sequence[int]] = ((),)
    """Token ids of each sequence, in turn; with a seed, it says which is the first."""
    seed: int = 0
    """Of how they are cut into responses, and in which order these come."""
    cached: int = 0
    first_token_s: float = 0.001
    breaks: list[int] = field(default_factory=list)
    """After so many responses the engine breaks away from all that it serves, and starts again: each time."""
    error: InflightError = field(default_factory=lambda: ServerUnreachable("Socket closed", broke=True))
    """How it breaks away."""
    at_break: Callable[[], None] = field(default=lambda: None, repr=False)
    """Is called when it does."""
    requests: list[GenerateRequest] = field(default_factory=list, repr=False)


class DrawnEngine:
    """Generates what was drawn. A token's log-prob follows from its place and its id."""

    def __init__(self, tokenizer: Tokenizer, drawn: Drawn) -> None:
        self._tokenizer, self._drawn = tokenizer, drawn
        self._life = self._given = self._running = 0
        """How many times it has broken away; how many responses it has given since then, or since it had nothing to
        do; and how many calls run."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        """Yield the responses of all sequences, mixed."""
        self._drawn.requests.append(request)
        check_resumed(request)
        self._given = self._given if self._running else 0
        self._running += 1
        try:
            async with aclosing(self._breaking(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._running -= 1

    async def _breaking(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        drawn, life = self._drawn, self._life
        draw = random.Random(f"{drawn.seed}{request.stream}")
        waiting = [list(self._responses(request, index, draw)) for index in range(request.sequences)]
        scores = self._prompt_scores(request)
        while any(waiting):
            await asyncio.sleep(0)
            delta = draw.choice([one for one in waiting if one]).pop(0)
            # The prompt's log-probs come once, with the first sequence's first tokens.
            if scores and delta.index == 0 and (delta.finish_reason or delta.tokens):
                delta, scores = replace(delta, outputs={**delta.outputs, **scores}), {}
            if drawn.breaks and self._given >= drawn.breaks[0]:
                drawn.breaks.pop(0)
                drawn.at_break()
                self._life, self._given = self._life + 1, 0
            if life != self._life:
                raise drawn.error
            self._given += 1
            yield delta

    async def close(self) -> None:
        """Close nothing."""

    def _responses(self, request: GenerateRequest, index: int, draw: random.Random) -> Iterator[EngineDelta]:
        number = (index + (request.seed or 0)) % len(self._drawn.outputs)
        tokens, reason, limits, at_once = self._ended(request, self._drawn.outputs[number])
        done = len(request.resumed_ids)
        assert list(request.resumed_ids) == tokens[:done]
        while True:
            size = draw.randint(0, 4) if request.stream else len(tokens)
            part = tokens[done : done + size]
            done += len(part)
            ends = done == len(tokens) and (at_once or not request.stream or draw.random() < 0.5)
            scored = [(token, _log_prob(token)) for token in part]
            yield EngineDelta(
                index,
                part,
                limits[len(tokens) + 1 if ends else done] if request.stop_strings else None,
                reason if ends else None,
                [score for _, score in scored] if request.log_probs else [],
                [_likeliest(one, request.top_log_probs) for one in scored] if request.top_log_probs else [],
                done,
                self._drawn.cached if ends else 0,
                self._times() if ends and request.timed and tokens else {},
            )
            if ends:
                return

    def _ended(self, request: GenerateRequest, output: Sequence[int]) -> tuple[list[int], str, list[int], bool]:
        """Return the tokens up to the end, why they end, and after each of them how many characters may be shown.

        The last value is whether the end comes with the last token; an end id comes behind it, with a step of its own.
        """
        text = StopTextLimit(self._tokenizer, request.stop_strings)
        tokens: list[int] = []
        limits, reason, at_once = [0], "stop", False
        for token in output:
            if token in request.end_ids:
                break
            tokens.append(token)
            stopped = text.push(token)
            limits.append(text.limit)
            if stopped or token in request.stop_token_ids or len(tokens) == request.max_tokens:
                reason = "stop" if stopped or token in request.stop_token_ids else "length"
                at_once = True
                break
        return tokens, reason, [*limits, text.finish()], at_once

    def _times(self) -> Mapping[str, np.ndarray]:
        times = {"arrival_time_ns": 10**12, "first_token_time_ns": 10**12 + round(self._drawn.first_token_s * 1e9)}
        return {name: np.array([[value]], np.int64) for name, value in times.items()}

    def _prompt_scores(self, request: GenerateRequest) -> Mapping[str, np.ndarray]:
        if (count := request.prompt_log_probs) is None:
            return {}
        scored = [(token, _log_prob(token)) for token in request.prompt[1:]]
        made = {"prompt_log_probs": np.array([[score for _, score in scored]], np.float32)}
        if count:
            top = [_likeliest(one, count) for one in scored]
            made["prompt_top_log_prob_ids"] = np.array([[[token for token, _ in row] for row in top]], np.int32)
            made["prompt_top_log_probs"] = np.array([[[score for _, score in row] for row in top]], np.float32)
            shape = (1, len(top), count)
            made = {name: one if name == "prompt_log_probs" else one.reshape(shape) for name, one in made.items()}
        return made


def _log_prob(token: int) -> float:
    return -(token % 64) / 8


def _likeliest(scored: tuple[int, float], count: int) -> list[tuple[int, float]]:
    """Return so many tokens, the best first; the token itself is among them where it is likely."""
    token, score = scored
    others = [(token + place, -place / 4) for place in range(1, count + 1)]
    return sorted([scored, *others] if score > -4 else others, key=lambda one: -one[1])[:count]


def check_resumed(request: GenerateRequest) -> None:
    """Hold a request that goes on behind tokens to what the engine takes."""
    if not request.resumed_ids:
        assert not request.resumed_log_probs
        return
    assert request.sequences == 1
    assert request.prompt_log_probs is None
    assert len(request.resumed_ids) < request.max_tokens
    assert not {*request.resumed_ids} & {*request.end_ids}
    expected = [_log_prob(token) for token in request.resumed_ids] if request.log_probs else []
    assert list(request.resumed_log_probs) == expected


@contextmanager
def drawn_engine(**settings: Any) -> Iterator[tuple[Inside, Drawn]]:
    """Serve the demo with an engine that generates what is drawn."""
    drawn = Drawn()
    with served_by(lambda tokenizer: DrawnEngine(tokenizer, drawn), **settings) as running:
        yield running, drawn


@contextmanager
def resuming_engine(*, behind_tokens: bool = True, kept: bool = False) -> Iterator[tuple[Inside, Drawn]]:
    """Serve the demo with such an engine, which breaks away as it is drawn, behind what waits for it to come back."""
    with drawn_engine() as (running, drawn):
        app: Any = running.server.config.app
        gateway = app.state.gateway
        resumption = Resumption(True, behind_tokens, 600, kept)
        engine = ResumingEngine(gateway.engine, gateway.readiness, gateway.metrics, resumption)
        app.state.gateway = replace(gateway, engine=engine)
        yield running, drawn
