"""The engine, and what it is measured beside: transformers' ``generate`` and its continuous batching.

All get the same prompts, the same weights and the same threads, and make exactly as many tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.drive import Driver, ask
from inflight.engine.engine import Engine
from inflight.errors import EngineFailure

Prompts = Sequence[list[int]]
_PAGE_SIZE = 256
"""transformers' default."""
_POLL_S = 1.0


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one run, in its two phases."""

    prefill: float
    """Prompt tokens, until each stream had its first token."""
    decode: float
    """Tokens that came after that."""

    @classmethod
    def of(cls, prompts: Prompts, begun_s: float, arrivals_s: Sequence[Sequence[float]]) -> Rates:
        """Return the rates; ``arrivals_s``: of each stream's tokens, at least two of each."""
        filled = max(times[0] for times in arrivals_s)
        ended = max(times[-1] for times in arrivals_s)
        after = sum(moment > filled for times in arrivals_s for moment in times)
        return cls(sum(map(len, prompts)) / (filled - begun_s), after / (ended - filled))


class Peer(Protocol):
    """One of them."""

    name: str

    def run(self, prompts: Prompts, tokens: int) -> Rates:
        """Make ``tokens`` for each of the prompts, which are equally long.

        Raises:
            EngineFailure: it made another number.
        """

    def close(self) -> None:
        """Give back what it holds."""


class EnginePeer:
    """Inflight's engine."""

    name = "engine"

    def __init__(self, engine: Engine) -> None:
        self._driver = Driver(engine)

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._driver.engine

    def run(self, prompts: Prompts, tokens: int) -> Rates:
        """Make ``tokens`` for each prompt."""
        begun = time.perf_counter()
        streams = self._driver.run(ask(prompt, tokens) for prompt in prompts)
        return _rates(self.name, prompts, tokens, begun, [stream.arrivals_s for stream in streams])

    def close(self) -> None:
        """Nothing is held."""


class _Clock:
    """A stopping criterion that stops nothing and notes when it was asked: once for each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: Tensor, _scores: Tensor, **_more: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


class GeneratePeer:
    """transformers' ``generate`` on the batch of all prompts."""

    name = "generate"

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def run(self, prompts: Prompts, tokens: int) -> Rates:
        """Make ``tokens`` for each prompt."""
        clock, ids = _Clock(), torch.tensor(prompts, device=self._model.device)
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        begun = time.perf_counter()
        self._model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[clock], **settings)
        return _rates(self.name, prompts, tokens, begun, [clock.times] * len(prompts))

    def close(self) -> None:
        """Nothing is held."""


class ContinuousPeer:
    """transformers' continuous batching, its cache and its buffers made before the time is taken."""

    name = "continuous batching"

    def __init__(self, model: Any, streams: int, longest: int, tokens_per_step: int) -> None:
        """
        Args:
            model: of transformers.
            streams: requests at once.
            longest: tokens of a sequence, prompt and output.
            tokens_per_step: as the engine's.
        """
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._model = model
        self._settings = {
            "generation_config": GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            "continuous_batching_config": ContinuousBatchingConfig(
                num_blocks=streams * -(-longest // _PAGE_SIZE),
                max_batch_tokens=max(tokens_per_step, streams),
                max_requests_per_batch=streams,
                allow_block_sharing=False,
                **({} if model.device.type == "cuda" else {"auto_switch_to_flash": False}),  # older versions have none
            ),
            "persistent_manager": True,
        }

    def run(self, prompts: Prompts, tokens: int) -> Rates:
        """Make ``tokens`` for each prompt; its thread is started before the time is taken, and stopped after."""
        with self._model.continuous_batching_context_manager(**self._settings) as manager:
            begun = time.perf_counter()
            inputs = [list(prompt) for prompt in prompts]
            manager.add_requests(inputs=inputs, max_new_tokens=tokens, record_timestamps=True)
            arrivals = [result.timestamps for result in self._results(manager, len(prompts))]
        return _rates(self.name, prompts, tokens, begun, arrivals)

    def _results(self, manager: Any, count: int) -> Iterator[Any]:
        while count:
            result = manager.get_result(timeout=_POLL_S)
            if result is not None and result.is_finished():
                count -= 1
                yield result
            elif result is None and not manager.is_running():
                raise EngineFailure(f"{self.name}: its thread ended early")

    def close(self) -> None:
        """Free its cache."""
        self._model.destroy_cached_continuous_batching_manager()


def load_transformers(directory: Path, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the checkpoint as a transformers model that computes in ``dtype``."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def _rates(name: str, prompts: Prompts, tokens: int, begun_s: float, arrivals_s: Sequence[Sequence[float]]) -> Rates:
    made = {len(times) for times in arrivals_s}
    if made != {tokens}:
        raise EngineFailure(f"{name} made {sorted(made)} tokens; {tokens} were asked for")
    return Rates.of(prompts, begun_s, arrivals_s)
