"""Measures the portable engine on this machine, step by step: what plans are calibrated and checked with.

Loads are taken in turn, several times over, and each row is the median: a machine's mood of one moment spoils no row.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inflight.engine.checkpoint import load_config
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.request import Request
from inflight.errors import DeploymentError, EngineFailure
from inflight.export.plan.calibration import Measured
from inflight.export.plan.stopwatch import Stopwatch
from inflight.sampling import SamplingParams

STREAMS = (1, 2, 4, 8, 16, 32)
_TOKENS_PER_STEP = 512
_DECODED = 16
"""Steps timed per load and round."""
_GENERATED = 64
"""Tokens that a stream may generate: enough for the prompts of the last stream to be computed, and the steps timed."""
_BLOCK_SIZE = 16
_CONTEXTS = 64, 512
"""Tokens of the streams when the timing begins."""


@dataclass(frozen=True)
class Load:
    """What the engine is given: streams that decode, and a prompt that arrives meanwhile."""

    streams: int
    context: int = 0
    """Tokens of each of them when the timing begins."""
    prompt: int = 0
    """Tokens of the prompt; 0: none arrives."""


def loads(max_length: int) -> list[Load]:
    """Return the loads to measure on a model whose sequences have at most ``max_length`` tokens."""
    contexts = [context for context in _CONTEXTS if context + _GENERATED <= max_length]
    prompts = [prompt for prompt in (64, 128, 256, 480, 1024) if prompt + 1 < max_length]
    decodes = [Load(streams, context) for context in contexts for streams in STREAMS]
    prefills = [Load(0, 0, prompt) for prompt in prompts]
    mixed = [Load(8, contexts[0], prompt) for prompt in prompts if prompt <= 256] if contexts else []
    return decodes + prefills + mixed


def measure(
    model: Path, dtype: str, rounds: int, on_load: Callable[[int, int], object] = lambda _done, _all: None
) -> list[Measured]:
    """Measure the engine with the checkpoint in ``model``, computing in ``float32`` or ``bfloat16``.

    Each load is measured ``rounds`` times; ``on_load`` is called with the loads done and their number.

    Raises:
        DeploymentError: the checkpoint cannot be served, or its sequences are too short.
    """
    config = load_config(model)
    shortest = min(_CONTEXTS) + _GENERATED
    if config.max_position_embeddings < shortest:
        raise DeploymentError(
            f"--measure: the model's longest sequence has {config.max_position_embeddings} tokens; {shortest} are "
            "needed"
        )
    todo = loads(config.max_position_embeddings)
    tokens = max(max(STREAMS) * max(load.context + _GENERATED for load in todo), config.max_position_embeddings)
    settings = EngineConfig(
        model,
        device="cpu",
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        block_size=_BLOCK_SIZE,
        num_blocks=-(-tokens // _BLOCK_SIZE) + max(STREAMS),
        prefix_reuse=False,
        max_tokens_per_step=_TOKENS_PER_STEP,
        max_batch_size=max(STREAMS) + 1,
    )
    driver = _Driver(Engine.load(settings), config.vocab_size)
    seconds: dict[Load, list[float]] = {load: [] for load in todo}
    for round_number in range(rounds + 1):
        for index, load in enumerate(todo):
            times = driver.times(load)
            if round_number:  # the first one warms up
                seconds[load] += times
            on_load(round_number * len(todo) + index + 1, (rounds + 1) * len(todo))
    return [
        Measured(
            streams=load.streams,
            context=load.context + _DECODED // 2 if load.streams and not load.prompt else load.context,
            prompt_tokens=load.prompt,
            prompt_steps=-(-load.prompt // (_TOKENS_PER_STEP - load.streams)),
            step_ms=round(1000 * statistics.median(times), 4),
        )
        for load, times in seconds.items()
    ]


class _Driver:
    """Brings the engine into a load and times its steps there."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine, self._vocab_size, self._random = engine, vocab_size, random.Random(0)

    def times(self, load: Load) -> list[float]:
        """Return the seconds of the load's steps."""
        requests = [self._submit(load.context) for _ in range(load.streams)]
        while self._engine.stats.state().step.decodes < load.streams:
            self._engine.step()
            if self._engine.stats.state().active < load.streams:
                raise EngineFailure(f"of {load.streams} streams, some ended before all decoded")
        times = []
        if load.prompt:
            times.append(self._prefill(load.prompt))
        else:
            for _ in range(_DECODED):
                watch = Stopwatch()
                self._engine.step()
                times.append(watch.seconds)
        for request in requests:
            self._engine.cancel(request.key)
        while self._engine.busy:
            self._engine.step()
        return times

    def _prefill(self, prompt: int) -> float:
        """Return the mean step until the prompt has its first token."""
        key = self._submit(prompt, max_tokens=1).key
        watch, steps, ended = Stopwatch(), 0, False
        while not ended:
            ended = any(output.key == key and output.finished for output in self._engine.step())
            steps += 1
        return watch.seconds / steps

    def _submit(self, tokens: int, max_tokens: int = _GENERATED) -> Request:
        prompt = [self._random.randrange(self._vocab_size) for _ in range(tokens)]
        request = Request(prompt, SamplingParams(max_tokens, ignore_eos=True))
        self._engine.submit(request)
        return request
