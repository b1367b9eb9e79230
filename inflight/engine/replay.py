"""ReplayEngine: answers with the prompt's own tokens, over and over, without a model.

It stands in for the engine where the stages around it are measured or tested: what it does costs next to nothing, at a
pace that is set.
"""

from __future__ import annotations

import time
from dataclasses import fields

from inflight.engine.config import EngineConfig
from inflight.engine.request import FinishReason, Output, Request, RequestMetrics
from inflight.engine.stats import EngineStats
from inflight.errors import InflightError, UnsupportedFeature
from inflight.sampling import SamplingParams

_HONOURED = ("max_tokens", "end_ids", "ignore_eos", "seed")
"""What a replay follows, or what has no meaning to it and comes with every request."""
_TENSOR_OF = {
    "log_probs": "return_log_probs",
    "top_log_probs": "num_top_log_probs",
    "context_logits": "return_context_logits",
    "generation_logits": "return_generation_logits",
    "logit_bias": "embedding_bias",
    "bad_sequences": "bad_words_list",
    "stop_sequences": "stop_words_list",
    "guide": "guided_decoding_guide_type",
}
"""The fields of SamplingParams that the engine stage calls by another name."""


class ReplayEngine:
    """A ``SteppedEngine``: each step gives every running request one token."""

    def __init__(self, config: EngineConfig, step_s: float) -> None:
        """
        Args:
            config: its ``max_batch_size`` holds: more requests wait.
            step_s: how long a step takes; 0: no time.
        """
        self._step_s = step_s
        self._next_step = 0.0
        self._max_batch_size = config.max_batch_size
        self._requests: dict[int, Request] = {}
        self._metrics: dict[int, RequestMetrics] = {}
        self._ended: list[Output] = []
        self.stats = EngineStats(max=config.max_batch_size)

    def warm_up(self) -> None:
        """There is nothing to warm up."""

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._ended)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return max(0, len(self._requests) - self._max_batch_size)

    def validate(self, request: Request) -> None:
        """Refuse whatever would make no difference.

        Raises:
            UnsupportedFeature: naming what.
        """
        sampling, plain = request.sampling, SamplingParams(request.sampling.max_tokens)
        asked = {
            _TENSOR_OF.get(field.name, field.name): getattr(sampling, field.name) != getattr(plain, field.name)
            for field in fields(SamplingParams)
            if field.name not in _HONOURED
        }
        asked |= {"deadline_ms": request.deadline_ns is not None, "priority": request.priority != 0}
        asked["lora_name"] = request.lora is not None
        for name, given in asked.items():
            if given:
                raise UnsupportedFeature(f"{name} is not supported by the replay engine")

    def submit(self, request: Request) -> None:
        """Take a request."""
        self._requests[request.key] = request
        self._metrics[request.key] = RequestMetrics(request.arrival_ns, prompt_tokens=len(request.prompt))

    def cancel(self, key: int) -> None:
        """End a request."""
        if key in self._requests:
            self._ended.append(self._end(Output(key), FinishReason.CANCELLED))

    def step(self) -> list[Output]:
        """Give the requests that run one token each."""
        now = time.monotonic()
        if now < self._next_step:
            time.sleep(self._next_step - now)
        self._next_step = max(now, self._next_step) + self._step_s
        outputs, self._ended = self._ended, []
        running = list(self._requests.items())[: self._max_batch_size]
        prompts = [len(request.prompt) for key, request in running if not self._metrics[key].generated_tokens]
        for key, request in running:
            metrics = self._metrics[key]
            output = Output(key, [request.prompt[metrics.generated_tokens % len(request.prompt)]])
            metrics.generated_tokens += 1
            metrics.last_token_ns = time.time_ns()
            metrics.first_token_ns = metrics.first_token_ns or metrics.last_token_ns
            if metrics.generated_tokens == request.sampling.max_tokens:
                self._end(output, FinishReason.LENGTH)
            outputs.append(output)
        self._update_stats(len(running), prompts)
        return outputs

    def fail_all(self, error: InflightError) -> list[Output]:
        """End every request with ``error``."""
        outputs, self._ended = self._ended + [Output(key, error=error) for key in self._requests], []
        self._requests.clear()
        self._metrics.clear()
        self._update_stats(0, [])
        return outputs

    def _update_stats(self, scheduled: int, prompts: list[int]) -> None:
        """Count as the real engine does; ``prompts``: the lengths of those that the step has computed."""
        stats = self.stats
        stats.iterations += bool(scheduled)
        if not self._requests:  # what an idle engine shows is not its last step
            scheduled, prompts = 0, []
        stats.active, stats.scheduled, stats.waiting = len(self._requests), scheduled, self.waiting
        stats.context, stats.generation = len(prompts), scheduled - len(prompts)
        stats.total_context_tokens = sum(prompts)

    def _end(self, output: Output, reason: FinishReason) -> Output:
        del self._requests[output.key]
        output.metrics = self._metrics.pop(output.key)
        output.finish_reason = reason
        return output
