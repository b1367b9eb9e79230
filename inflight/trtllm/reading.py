"""Reads what TensorRT-LLM reports into Inflight's records: scores, metrics, statistics."""

from __future__ import annotations

from typing import Any

from inflight.engine.request import FinishReason, Output, RequestMetrics
from inflight.engine.stats import NO_STEP, EngineState, EngineStats, StepCounts, process_memory
from inflight.errors import EngineFailure
from inflight.sampling import SamplingParams
from inflight.trtllm.runtime import Event

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "cancelled": FinishReason.CANCELLED,
    "timeout": FinishReason.DEADLINE,
}


def report(output: Output, sampling: SamplingParams, event: Event, index: int) -> None:
    """Add the event's token at ``index`` to the output, with what was asked about it."""
    token = event.tokens[index]
    output.tokens.append(token)
    if sampling.log_probs:
        output.log_probs = [*(output.log_probs or []), event.log_probs[index][token]]
    if sampling.top_log_probs:
        best = sorted(event.log_probs[index].items(), key=lambda item: -item[1])[: sampling.top_log_probs]
        output.top_log_probs = [*(output.top_log_probs or []), best]
    if sampling.generation_logits:
        assert event.generation_logits is not None
        row = event.generation_logits[index]
        if _takes_likeliest(sampling) and row[token] < row.max():
            raise ValueError(f"the logits of token {token} are not those that it was drawn from")
        output.generation_logits = [*(output.generation_logits or []), row]


def _takes_likeliest(sampling: SamplingParams) -> bool:
    """Return whether each token is the likeliest by the model's own logits, which nothing changes first."""
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    changed = sampling.logit_bias or sampling.bad_sequences or sampling.guide or sampling.min_tokens
    return sampling.greedy and not changed and penalties == (1, 0, 0)


def require_whole(output: Output, prompt_length: int) -> None:
    """Fail an output whose context logits are fewer than the prompt's tokens: the cached ones have none."""
    assert output.context_logits is not None
    if len(output.context_logits) != prompt_length:
        output.error = EngineFailure(
            f"TensorRT-LLM gave context logits for {len(output.context_logits)} of {prompt_length} tokens; "
            "set kv_cache.prefix_reuse to false"
        )


def read_metrics(metrics: RequestMetrics, event: Event, handed_ns: int) -> None:
    """Take over what TensorRT-LLM measured so far of a sequence that it got at ``handed_ns``.

    Its clock is its own: only differences of its times are used.
    """
    perf = event.perf
    metrics.cached_tokens = max(metrics.cached_tokens, event.cached_tokens)
    if perf is None:
        metrics.first_scheduled_ns = metrics.first_scheduled_ns or handed_ns
        return
    timing, cache, drafts = perf.timing_metrics, perf.kv_cache_metrics, perf.speculative_decoding
    waited = (timing.first_scheduled_time - timing.arrival_time).total_seconds()
    metrics.first_scheduled_ns = handed_ns + max(0, int(waited * 1e9))
    metrics.new_blocks = cache.num_new_allocated_blocks
    metrics.reused_blocks = cache.num_reused_blocks
    metrics.total_blocks = cache.num_total_allocated_blocks
    metrics.draft_tokens = drafts.total_draft_tokens
    metrics.accepted_draft_tokens = drafts.total_accepted_draft_tokens


def count_iteration(stats: EngineStats, iteration: dict[str, Any]) -> None:
    """Count one iteration that computed something; of a generating sequence it counts one token, without drafts."""
    step = _step_of(iteration)
    if step.sequences:
        stats.count_step(step, iteration.get("iterLatencyMS", 0.0) / 1000)


def read_counts(stats: EngineStats, iteration: dict[str, Any]) -> None:
    """Read what TensorRT-LLM itself has counted so far, where the iteration says so."""
    stats.iterations = iteration.get("iter", stats.iterations)
    stats.kv_blocks_reused = (iteration.get("kvCacheStats") or {}).get("reusedBlocks", stats.kv_blocks_reused)


def _step_of(iteration: dict[str, Any]) -> StepCounts:
    batch = iteration.get("inflightBatchingStats") or {}
    names = ("numScheduledRequests", "numContextRequests", "numGenRequests", "numCtxTokens", "numGenRequests")
    return StepCounts(*(batch.get(name, 0) for name in names))


def memory_of(iteration: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that this process has in memory, and those that TensorRT-LLM says it has on GPUs and pinned."""
    gpu, pinned = iteration.get("gpuMemUsage", 0), iteration.get("pinnedMemUsage", 0)
    return process_memory() | {"gpu": gpu, "pinned": pinned}


def state_of(before: EngineState, iteration: dict[str, Any], waiting: int, running: int, idle: bool) -> EngineState:
    """Return what the engine holds now, by the statistics of TensorRT-LLM's last iteration.

    Once ``idle``, with no generation open, there is no iteration more: what the last one held and ran is not read then.
    Cached blocks without an owner are among the free ones there, and are not counted apart.

    An iteration may leave out what does not change since ``before``. ``waiting`` requests are in the queue before
    TensorRT-LLM, which has those that are ``running``.
    """
    batch, cache = iteration.get("inflightBatchingStats") or {}, iteration.get("kvCacheStats") or {}
    return EngineState(
        active=waiting + running,
        waiting=waiting,
        running=running,
        paused=0 if idle else batch.get("numPausedRequests", 0),
        step=NO_STEP if idle else _step_of(iteration),
        kv_blocks_max=cache.get("maxNumBlocks", before.kv_blocks_max),
        kv_blocks_used=0 if idle else cache.get("usedNumBlocks", 0),
        kv_blocks_cached=None,
        tokens_per_block=cache.get("tokensPerBlock", before.tokens_per_block),
    )
