"""The table of metric families: names, types, labels and meanings of what the stages export. All else derives from it.

The ``nv_`` families are those of the last upstream line (TensorRT-LLM 1.2.x), by their names and labels; the
``inflight_`` ones are Inflight's own, in Prometheus style: base units, ``_total`` for counters. The stages make their
families from this table; docs/metrics.md, the alert rules and the dashboards are written from it or checked against it.
Every series has the labels ``model`` (the Triton model that exports it) and ``version`` too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from inflight.contract import DETOKENIZER, ENGINE, TOKENIZER, TRTLLM

SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of what happens once per step, response or token."""
SECONDS = (*SHORT_SECONDS[3:], 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of what a request waits for."""
LENGTHS = (10, 50, 100, 500, 1000)
"""Upper bounds of upstream's histograms of tokens."""
STEP_PARTS = ("schedule", "draft", "run", "finish")
"""In their order; nothing is drafted without speculation."""

RESTART_CAUSES = ("crash", "exit", "stage_died", "stage_hung", "server_hung", "start")
"""Why `inflight serve` starts a server again: it ended by a signal or by itself, a stage ended, a stage or the server
stands still, a new start failed."""

_ENGINE, _ALL = (ENGINE,), (TOKENIZER, ENGINE, DETOKENIZER)
_PYTORCH = "pytorch"
_ENGINES = (_PYTORCH, "replay", TRTLLM)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    stages: tuple[str, ...] = _ENGINE
    """The models that export it."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Beside ``model`` and ``version``: name to its values; () where the values are told at run time."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""
    engines: tuple[str, ...] = _ENGINES
    """Values of ``engine.kind`` whose engine stage exports it: the others have nothing to fill it with. The other
    stages export theirs beside every engine."""

    @property
    def attribute(self) -> str:
        """Its name without prefix, unit and ``_total``: what the attribute that fills it is called, wherever it is."""
        name = re.sub("^(nv_trt_llm|nv_llm|inflight)_", "", self.name)
        return name.removesuffix("_total").removesuffix("_seconds")

    def exported_by(self, stage: str, engine: str) -> bool:
        """Return whether a stage (the model's name) exports it beside this kind of engine."""
        return stage in self.stages and (stage != ENGINE or engine in self.engines)


def _upstream(name: str, label: str, text: str, values: str) -> Family:
    return Family(f"nv_trt_llm_{name}", "gauge", text, labels={label: tuple(values.split())})


def _seconds(name: str, text: str, **more: object) -> Family:
    return Family(f"inflight_{name}_seconds", "histogram", text, buckets=SECONDS, **more)  # type: ignore[arg-type]


UPSTREAM = (
    _upstream("request_metrics", "request_type", "TRT LLM request metrics", "active max scheduled context waiting"),
    _upstream("runtime_memory_metrics", "memory_type", "TRT LLM runtime memory metrics", "cpu gpu pinned"),
    _upstream(
        "kv_cache_block_metrics",
        "kv_cache_block_type",
        "TRT LLM KV cache block metrics",
        "max free used tokens_per reused fraction",
    ),
    _upstream(
        "inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        "TRT LLM inflight_batcher-specific metrics",
        "total_context_tokens generation_requests micro_batch_id paused_requests",
    ),
    _upstream("general_metrics", "general_type", "General TRT LLM metrics", "timestamp iteration_counter"),
    Family(
        "nv_llm_input_token_len",
        "histogram",
        "TRT LLM response metrics",
        labels={"response_metric_type": ("total_input_tokens",)},
        buckets=LENGTHS,
    ),
    Family(
        "nv_llm_output_token_len",
        "histogram",
        "TRT LLM response metrics",
        labels={"response_metric_type": ("total_output_tokens",)},
        buckets=LENGTHS,
    ),
)
"""Upstream's families. Its V1 and disaggregated-serving ones have nothing to count here and are not exported."""

REQUESTS = (
    Family(
        "inflight_requests_total",
        "counter",
        "Finished and refused sequences, and requests that failed behind the engine; one that is refused before it is "
        "known how many sequences it has counts once",
        stages=_ALL,
        labels={"outcome": ()},
    ),
    Family("inflight_running_requests", "gauge", "Sequences in the running batch"),
    Family("inflight_waiting_requests", "gauge", "Sequences in the queue"),
    Family("inflight_queue_limit", "gauge", "Sequences that may wait; one more is refused"),
    _seconds("request_queue", "Arrival at the engine to the first step"),
    _seconds("request_prefill", "First step to the first token"),
    _seconds("request_decode", "First token to the last"),
    _seconds("time_to_first_token", "Arrival at the engine to the first token"),
    _seconds("request_duration", "Arrival at the engine to the end of the request"),
    Family(
        "inflight_inter_token_seconds",
        "histogram",
        "Time between two tokens of one sequence, once per token after the first",
        buckets=SHORT_SECONDS,
    ),
)
TOKENS = (
    Family("inflight_prompt_tokens_total", "counter", "Prompt tokens of admitted requests"),
    Family("inflight_cached_tokens_total", "counter", "Prompt tokens of admitted requests taken from the prefix cache"),
    Family("inflight_generated_tokens_total", "counter", "Tokens generated"),
    Family(
        "inflight_recomputed_tokens_total", "counter", "Tokens computed again after a preemption", engines=(_PYTORCH,)
    ),
    Family(
        "inflight_draft_tokens_total",
        "counter",
        "Tokens proposed by speculative decoding for finished requests",
        engines=(_PYTORCH, TRTLLM),
    ),
    Family(
        "inflight_accepted_draft_tokens_total",
        "counter",
        "Proposed tokens that were accepted",
        engines=(_PYTORCH, TRTLLM),
    ),
)
BATCH = (
    Family("inflight_steps_total", "counter", "Engine steps"),
    Family("inflight_step_sequences_total", "counter", "Sequences in the steps' batches, summed over steps"),
    Family(
        "inflight_step_tokens_total",
        "counter",
        "Tokens computed by the steps",
        labels={"kind": ("prefill", "decode")},
    ),
    Family(
        "inflight_drafted_sequences",
        "gauge",
        "Sequences that had draft tokens in the last step; beside the running ones: for how many speculation pays",
        engines=(_PYTORCH,),
    ),
    Family("inflight_batch_size_limit", "gauge", "Sequences that may run at once"),
    Family("inflight_step_tokens_limit", "gauge", "Tokens that one step may compute", engines=(_PYTORCH,)),
    Family(
        "inflight_step_seconds",
        "histogram",
        "Duration of an engine step",
        buckets=SHORT_SECONDS,
    ),
    Family(
        "inflight_step_part_seconds_total",
        "counter",
        "Time of the steps by their parts",
        labels={"part": STEP_PARTS},
        engines=(_PYTORCH,),
    ),
    Family("inflight_responses_total", "counter", "Responses of the engine stage, without heartbeats and errors"),
)
KV_CACHE = (
    Family(
        "inflight_kv_cache_blocks",
        "gauge",
        "KV cache blocks by state",
        labels={"state": ("used", "cached", "free")},
        engines=(_PYTORCH, TRTLLM),
    ),
    Family(
        "inflight_kv_cache_block_tokens",
        "gauge",
        "Tokens that a KV cache block holds",
        engines=(_PYTORCH, TRTLLM),
    ),
    Family(
        "inflight_kv_cache_reserved_blocks",
        "gauge",
        "KV cache blocks promised to running sequences that have not taken them yet",
        engines=(_PYTORCH,),
    ),
    Family("inflight_kv_cache_evictions_total", "counter", "Cached blocks forgotten to make room", engines=(_PYTORCH,)),
    Family(
        "inflight_kv_cache_offloaded_blocks",
        "gauge",
        "Blocks in the KV cache's second tier, beside those that inflight_kv_cache_blocks counts",
        engines=(_PYTORCH,),
    ),
    Family(
        "inflight_kv_cache_offload_blocks_limit",
        "gauge",
        "Blocks that the KV cache's second tier holds; 0: there is none, or no more",
        engines=(_PYTORCH,),
    ),
    Family(
        "inflight_kv_cache_offloaded_tokens_total",
        "counter",
        "Tokens whose blocks were moved to the second tier to make room",
        engines=(_PYTORCH,),
    ),
    Family(
        "inflight_kv_cache_restored_tokens_total",
        "counter",
        "Tokens that were taken from the second tier in place of computing them; cached tokens too",
        engines=(_PYTORCH,),
    ),
    Family(
        "inflight_preemptions_total",
        "counter",
        "Sequences that lost their blocks and went back to the queue",
        engines=(_PYTORCH,),
    ),
)
STAGES = (
    Family(
        "inflight_tokenizer_seconds",
        "histogram",
        "Time to tokenize one batch of requests",
        stages=(TOKENIZER,),
        buckets=SHORT_SECONDS,
    ),
    Family(
        "inflight_detokenizer_seconds",
        "histogram",
        "Time to detokenize one response",
        stages=(DETOKENIZER,),
        buckets=SHORT_SECONDS,
    ),
    Family(
        "inflight_startup_seconds",
        "gauge",
        "Duration of a stage's start by phase",
        stages=_ALL,
        labels={"phase": ()},
    ),
    Family("inflight_start_time_seconds", "gauge", "When the stage was ready, since the epoch", stages=_ALL),
    Family(
        "inflight_restarts_total",
        "counter",
        "New starts of the server by `inflight serve`, since that began",
        stages=(TOKENIZER,),
        labels={"cause": RESTART_CAUSES},
    ),
    Family(
        "inflight_heartbeat_time_seconds",
        "gauge",
        "When the stage's process last showed that it lives, since the epoch",
        stages=_ALL,
    ),
    Family(
        "inflight_build_info",
        "gauge",
        "1; the labels say what is served",
        labels={"inflight_version": (), "engine": (), "checkpoint": ()},
    ),
)
EXPORT = (
    Family(
        "inflight_metrics_export_cpu_seconds_total",
        "counter",
        "CPU time that the stage's process spends on exporting its metrics",
        stages=_ALL,
    ),
    Family(
        "inflight_metrics_export_calls_total",
        "counter",
        "Values handed to the server's process for its page; each takes CPU time there too",
        stages=_ALL,
    ),
)
"""What an exporter counts of itself."""

FAMILIES: dict[str, Family] = {
    family.name: family for group in (UPSTREAM, REQUESTS, TOKENS, BATCH, KV_CACHE, STAGES, EXPORT) for family in group
}
"""Every family by its name."""
