"""The table of metric families: names, labels and meanings of what the stages export. All else derives from it.

The ``nv_`` families are those of the last upstream line (TensorRT-LLM 1.2.x), by their names and labels; the
``inflight_`` ones are Inflight's own, in Prometheus style: base units, ``_total`` for counters. The stages make their
families from this table; docs/metrics.md, the alert rules and the dashboards are written from it or checked against it.
Every series has the labels ``model`` (the Triton model that exports it) and ``version`` too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inflight.contract import DETOKENIZER, ENGINE, TOKENIZER, TRTLLM

SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of what happens once per step, response or token."""
SECONDS = (*SHORT_SECONDS[3:], 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of what a request waits for."""
LENGTHS = (10, 50, 100, 500, 1000)
"""Upper bounds of upstream's histograms of tokens."""
STEP_PARTS = ("schedule", "draft", "run", "finish")
"""The parts of a step, in their order; nothing is drafted without speculation."""

RESTART_CAUSES = ("crash", "exit", "stage_died", "stage_hung", "server_hung", "start", "generation")
"""Why `inflight serve` starts a server again: it ended by a signal or by itself, a stage ended, a stage or the server
stands still, a new start failed, one that is ready generates nothing."""
PARTS = ("triton", "gateway", "door")
"""What `inflight serve` runs. That the gateway or the door was started again is counted with its name as the cause, on
the status server's page alone: the server's own page is told the counts when it starts."""
RESTARTS = "inflight_restarts_total"

_ALL = (TOKENIZER, ENGINE, DETOKENIZER)
_WITH_MODEL = ("pytorch", TRTLLM)


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric family."""

    name: str
    help: str
    owner: str = "engine"
    """The object that counts it: ``engine`` is the engine's ``EngineStats``, ``stage`` the stage's ``StageMetrics``,
    ``streams`` the engine stage's ``ResponseStreams``, ``exporter`` itself."""
    stages: tuple[str, ...] = (ENGINE,)
    """The models that export it."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Its labels beside ``model`` and ``version``: name to values; () where the values are known at run time only."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""
    engines: tuple[str, ...] = ("pytorch", "replay", TRTLLM)
    """Values of ``engine.kind`` whose engine stage exports it: the others have nothing to fill it with. The other
    stages export theirs beside every engine."""

    @property
    def kind(self) -> str:
        """``counter`` by its name, ``histogram`` where it has buckets, else ``gauge``."""
        return "counter" if self.name.endswith("_total") else "histogram" if self.buckets else "gauge"

    @property
    def source(self) -> str:
        """What it shows: the owner and the owner's attribute, whose name is the family's without prefix and unit."""
        attribute = re.sub("^(inflight|nv_trt_llm|nv_llm)_|(_seconds)?(_total)?$", "", self.name)
        return f"{self.owner}.{attribute}"

    def exported_by(self, stage: str, engine: str) -> bool:
        """Return whether a stage (the model's name) exports it beside this kind of engine."""
        return stage in self.stages and (stage != ENGINE or engine in self.engines)


def _upstream(name: str, label: str, text: str, values: str, buckets: tuple[float, ...] = ()) -> MetricFamily:
    return MetricFamily(f"nv_{name}", text, labels={label: tuple(values.split())}, buckets=buckets)


def _stage(name: str, text: str, stages: tuple[str, ...] = _ALL, owner: str = "stage", **more: Any) -> MetricFamily:
    return MetricFamily(name, text, owner, stages, **more)


def _portable(name: str, text: str, **more: Any) -> MetricFamily:
    return MetricFamily(name, text, engines=("pytorch",), **more)


UPSTREAM = (
    _upstream(
        "trt_llm_request_metrics", "request_type", "TRT LLM request metrics", "active max scheduled context waiting"
    ),
    _upstream("trt_llm_runtime_memory_metrics", "memory_type", "TRT LLM runtime memory metrics", "cpu gpu pinned"),
    _upstream(
        "trt_llm_kv_cache_block_metrics",
        "kv_cache_block_type",
        "TRT LLM KV cache block metrics",
        "max free used tokens_per reused fraction",
    ),
    _upstream(
        "trt_llm_inflight_batcher_metrics",
        "inflight_batcher_specific_metric",
        "TRT LLM inflight_batcher-specific metrics",
        "total_context_tokens generation_requests micro_batch_id paused_requests",
    ),
    _upstream("trt_llm_general_metrics", "general_type", "General TRT LLM metrics", "timestamp iteration_counter"),
    _upstream("llm_input_token_len", "response_metric_type", "TRT LLM response metrics", "total_input_tokens", LENGTHS),
    _upstream(
        "llm_output_token_len", "response_metric_type", "TRT LLM response metrics", "total_output_tokens", LENGTHS
    ),
)
"""Upstream's families. Its V1 and disaggregated-serving ones have nothing to count here and are not exported."""

REQUESTS = (
    _stage(
        "inflight_requests_total",
        "Finished and refused sequences, and requests that failed behind the engine; one that is refused before it is "
        "known how many sequences it has counts once",
        labels={"outcome": ()},
    ),
    MetricFamily(
        "inflight_resumed_requests_total",
        "Sequences that went on behind what an earlier run had generated",
        engines=("pytorch", "replay"),
    ),
    MetricFamily("inflight_running_requests", "Sequences in the running batch"),
    MetricFamily("inflight_waiting_requests", "Sequences in the queue"),
    _stage("inflight_queue_limit", "Sequences that may wait; one more is refused", (ENGINE,)),
    MetricFamily("inflight_request_queue_seconds", "Arrival at the engine to the first step", buckets=SECONDS),
    MetricFamily("inflight_request_prefill_seconds", "First step to the first token", buckets=SECONDS),
    MetricFamily("inflight_request_decode_seconds", "First token to the last", buckets=SECONDS),
    MetricFamily("inflight_time_to_first_token_seconds", "Arrival at the engine to the first token", buckets=SECONDS),
    MetricFamily(
        "inflight_request_duration_seconds", "Arrival at the engine to the end of the request", buckets=SECONDS
    ),
    MetricFamily(
        "inflight_inter_token_seconds",
        "Time between two tokens of one sequence, once per token after the first",
        buckets=SHORT_SECONDS,
    ),
)
TOKENS = (
    MetricFamily("inflight_prompt_tokens_total", "Prompt tokens of admitted requests"),
    MetricFamily("inflight_cached_tokens_total", "Prompt tokens of admitted requests taken from the prefix cache"),
    MetricFamily("inflight_generated_tokens_total", "Tokens generated"),
    _portable("inflight_recomputed_tokens_total", "Tokens computed again after a preemption"),
    MetricFamily(
        "inflight_draft_tokens_total",
        "Tokens proposed by speculative decoding for finished requests",
        engines=_WITH_MODEL,
    ),
    MetricFamily("inflight_accepted_draft_tokens_total", "Proposed tokens that were accepted", engines=_WITH_MODEL),
)
BATCH = (
    MetricFamily("inflight_steps_total", "Engine steps"),
    MetricFamily("inflight_step_sequences_total", "Sequences in the steps' batches, summed over steps"),
    MetricFamily("inflight_step_tokens_total", "Tokens computed by the steps", labels={"kind": ("prefill", "decode")}),
    _portable(
        "inflight_drafted_sequences",
        "Sequences that had draft tokens in the last step; beside the running ones: for how many speculation pays",
    ),
    MetricFamily("inflight_batch_size_limit", "Sequences that may run at once"),
    _portable("inflight_step_tokens_limit", "Tokens that one step may compute"),
    MetricFamily("inflight_step_seconds", "Duration of an engine step", buckets=SHORT_SECONDS),
    _portable("inflight_step_part_seconds_total", "Time of the steps by their parts", labels={"part": STEP_PARTS}),
    MetricFamily(
        "inflight_responses_total", "Responses of the engine stage, without heartbeats and errors", owner="streams"
    ),
)
KV_CACHE = (
    MetricFamily(
        "inflight_kv_cache_blocks",
        "KV cache blocks by state",
        labels={"state": ("used", "cached", "free")},
        engines=_WITH_MODEL,
    ),
    MetricFamily("inflight_kv_cache_block_tokens", "Tokens that a KV cache block holds", engines=_WITH_MODEL),
    _portable(
        "inflight_kv_cache_reserved_blocks",
        "KV cache blocks promised to running sequences that have not taken them yet",
    ),
    _portable("inflight_kv_cache_evictions_total", "Cached blocks forgotten to make room"),
    _portable(
        "inflight_kv_cache_offloaded_blocks",
        "Blocks in the KV cache's second tier, beside those that inflight_kv_cache_blocks counts",
    ),
    _portable(
        "inflight_kv_cache_offload_blocks_limit",
        "Blocks that the KV cache's second tier holds; 0: there is none, or no more",
    ),
    _portable(
        "inflight_kv_cache_offloaded_tokens_total", "Tokens whose blocks were moved to the second tier to make room"
    ),
    _portable(
        "inflight_kv_cache_restored_tokens_total",
        "Tokens that were taken from the second tier in place of computing them; cached tokens too",
    ),
    _portable("inflight_preemptions_total", "Sequences that lost their blocks and went back to the queue"),
)
STAGES = (
    _stage("inflight_tokenizer_seconds", "Time to tokenize one request", (TOKENIZER,), buckets=SHORT_SECONDS),
    _stage("inflight_detokenizer_seconds", "Time to detokenize one response", (DETOKENIZER,), buckets=SHORT_SECONDS),
    _stage("inflight_startup_seconds", "Duration of a stage's start by phase", labels={"phase": ()}),
    _stage("inflight_start_time_seconds", "When the stage was ready, since the epoch"),
    _stage(
        RESTARTS,
        "New starts of the server by `inflight serve`, since that began",
        (TOKENIZER,),
        labels={"cause": RESTART_CAUSES},
    ),
    _stage("inflight_heartbeat_time_seconds", "When the stage's process last showed that it lives, since the epoch"),
    _stage(
        "inflight_build_info",
        "1; the labels say what is served",
        (ENGINE,),
        labels={"inflight_version": (), "engine": (), "checkpoint": ()},
    ),
)
EXPORT = (
    _stage(
        "inflight_metrics_export_cpu_seconds_total",
        "CPU time that the stage's process spends on exporting its metrics",
        owner="exporter",
    ),
    _stage(
        "inflight_metrics_export_calls_total",
        "Values handed to the server's process for its page; each takes CPU time there too",
        owner="exporter",
    ),
)
"""What an exporter counts of itself."""


GATEWAY_PROCESS = "gateway"
"""The process that exports the families of ``GATEWAY`` on its own page; it is no stage, and its series have the labels
of the table alone."""


def _gateway(name: str, text: str, **more: Any) -> MetricFamily:
    return MetricFamily(f"inflight_gateway_{name}", text, "gateway", (GATEWAY_PROCESS,), **more)


QUALITY_MODES = ("plain", "greedy", "shaped")
"""How the tokens of an answer are chosen: drawn from the model's own distribution, the likeliest, or drawn from another
one, which the request makes of it (temperature, limits on tokens, penalties, forms)."""
NATS = (1e-6, 1e-5, 1e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
GATEWAY = (
    _gateway("requests_total", "Requests answered, by route and status", labels={"route": (), "status": ()}),
    _gateway("disconnects_total", "Requests whose client left before the end of its answer", labels={"route": ()}),
    _gateway("slow_clients_total", "Streams that ended because their client read too slowly", labels={"route": ()}),
    _gateway("running_requests", "Requests under way", labels={"route": ()}),
    _gateway(
        "time_to_first_token_seconds",
        "Arrival at the gateway to the first token that the engine makes for any prompt or choice of the request, "
        "streamed or not",
        labels={"route": ()},
        buckets=SECONDS,
    ),
    _gateway(
        "request_duration_seconds",
        "Arrival at the gateway to the end of the answer",
        labels={"route": ()},
        buckets=SECONDS,
    ),
    _gateway("output_tokens_total", "Tokens of answers, by the engine's own count", labels={"route": ()}),
    _gateway("ignored_fields_total", "Fields of requests that had no effect", labels={"field": ()}),
    _gateway(
        "resumed_total",
        "Breaks of the engine under a request, by what came of it: resumed behind its tokens or repeated from its "
        "beginning; or its error, since the engine crashed_again, was not_back in time, or goes on behind no tokens",
        labels={"outcome": ("resumed", "repeated", "crashed_again", "not_back", "unsupported")},
    ),
    _gateway(
        "quality_answers_total",
        "Answers that were to be scored again by the reference, by what came of it",
        labels={"outcome": ("compared", "failed", "dropped")},
    ),
    _gateway("quality_tokens_total", "Tokens that the reference has scored", labels={"mode": QUALITY_MODES}),
    _gateway(
        "quality_agreeing_tokens_total",
        "Those of them that are the reference's likeliest",
        labels={"mode": QUALITY_MODES},
    ),
    _gateway(
        "quality_above_nats_total",
        "Log-probs as served less the reference's, summed over the tokens where that is positive",
        labels={"mode": QUALITY_MODES},
    ),
    _gateway(
        "quality_below_nats_total",
        "The reference's log-probs less those as served, summed over the tokens where that is positive",
        labels={"mode": QUALITY_MODES},
    ),
    _gateway(
        "quality_answer_difference_nats",
        "Absolute difference of the log-probs as served from the reference's, the mean over the tokens of an answer",
        labels={"mode": QUALITY_MODES},
        buckets=NATS,
    ),
    _gateway("engine_ready", "1 while the engine can be called, 0 while it is away"),
)
"""The gateway's families."""

READY = MetricFamily(
    "inflight_serve_ready", "1 where a generation has passed since the last start and no stop was asked for, else 0"
)
PART_UP = MetricFamily(
    "inflight_serve_part_up",
    "1 where a part's own metrics are on this page, 0 while it is away",
    labels={"part": PARTS},
)
SUPERVISOR = (READY, PART_UP)
"""The families of `inflight serve` itself, on the page of its status server, without the labels of the stages."""

FAMILIES: dict[str, MetricFamily] = {
    family.name: family for group in (UPSTREAM, REQUESTS, TOKENS, BATCH, KV_CACHE, STAGES, EXPORT) for family in group
}
"""Every family of the stages by its name."""
