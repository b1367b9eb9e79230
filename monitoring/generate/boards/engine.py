"""Engine and KV cache: what the steps do, and what memory they have."""

from __future__ import annotations

from monitoring.generate.panels import TOKENS_PER_SECOND, Row, board, heat_map, number, time_series
from monitoring.generate.promql import Query, mean, per_server, quantiles, rate, selector, total

STEPS = Row(
    "Steps",
    (
        time_series(
            "Steps",
            "Engine steps per second of each server. None while requests run means that the engine stands still.",
            (Query(rate("inflight_steps_total", "instance"), "{{instance}}"),),
            "ops",
            alerts=("InflightNoTokenProgress",),
        ),
        time_series(
            "Sequences per step",
            "Mean size of the batch, and its limit. A full batch is what makes an engine efficient.",
            (
                Query(f"{rate('inflight_step_sequences_total')} / {rate('inflight_steps_total')}", "mean"),
                Query(f"max({selector('inflight_batch_size_limit')})", "limit"),
            ),
        ),
        time_series(
            "Tokens per step",
            "Mean tokens computed in a step, prefill and decode, and the limit of their sum.",
            (
                Query(
                    f"{rate('inflight_step_tokens_total', 'kind')} / on () group_left () "
                    f"{rate('inflight_steps_total')}",
                    "{{kind}}",
                ),
            ),
            stacked=True,
        ),
        time_series(
            "Batch occupancy",
            "Sequences per step as a share of the batch's limit, over five minutes.",
            (Query('instance:inflight_batch_occupancy:ratio_rate5m{instance=~"$instance"}', "{{instance}}"),),
            "percentunit",
        ),
        time_series(
            "Step duration",
            "A step computes one token for each decoding sequence, so this is the floor of the inter-token time.",
            (*quantiles("inflight_step_seconds", "p50", "p99"), Query(mean("inflight_step_seconds"), "mean")),
            "s",
            alerts=("InflightItlHigh", "InflightItlRising"),
        ),
        time_series(
            "Time by part of a step",
            "Share of wall time in which the engine schedules, runs the model, finishes; the mean of the servers. "
            "The rest, to 100 %, is idle.",
            (Query(per_server("inflight_step_part_seconds_total", "part"), "{{part}}"),),
            "percentunit",
            stacked=True,
        ),
        heat_map("Step duration, all steps", "How many steps per second took how long.", "inflight_step_seconds", 24),
    ),
)

BATCH = Row(
    "Batch and queue",
    (
        time_series(
            "Running and waiting",
            "Sequences in the running batch and in the queue.",
            (
                Query(total("inflight_running_requests"), "running"),
                Query(total("inflight_waiting_requests"), "waiting"),
            ),
            alerts=("InflightQueueGrowing", "InflightQueueNearLimit"),
        ),
        time_series(
            "Computed tokens",
            "Tokens computed per second. Prefill beside much decode lengthens the inter-token time.",
            (Query(rate("inflight_step_tokens_total", "kind"), "{{kind}}"),),
            TOKENS_PER_SECOND,
            stacked=True,
        ),
        time_series(
            "Responses and tokens per response",
            "Responses of the engine's stage per second; under load each carries several tokens.",
            (
                Query(rate("inflight_responses_total"), "responses per second"),
                Query(f"{rate('inflight_generated_tokens_total')} / {rate('inflight_responses_total')}", "tokens each"),
            ),
        ),
    ),
)

KV_CACHE = Row(
    "KV cache",
    (
        time_series(
            "Blocks",
            "used: of running requests; cached: finished, kept for equal prefixes, given up when needed; free.",
            (Query(total("inflight_kv_cache_blocks", "state"), "{{state}}"),),
            stacked=True,
            alerts=("InflightKvCacheHigh", "InflightKvCacheFull"),
        ),
        time_series(
            "Promised blocks",
            "Free or cached blocks that running requests may still take and nobody else (policy guaranteed_no_evict).",
            (Query(total("inflight_kv_cache_reserved_blocks"), "promised"),),
            alerts=("InflightKvCacheHigh", "InflightKvCacheFull"),
        ),
        number(
            "Capacity",
            "Tokens that all blocks together hold.",
            Query(
                f"sum({selector('inflight_kv_cache_blocks')}) * max({selector('inflight_kv_cache_block_tokens')})",
                "tokens",
            ),
        ),
        time_series(
            "Prefix hit rate",
            "Prompt tokens taken from the prefix cache as a share of all, over half an hour.",
            (Query('instance:inflight_prefix_hit:ratio_rate30m{instance=~"$instance"}', "{{instance}}"),),
            "percentunit",
            width=6,
            alerts=("InflightPrefixHitRateDropped",),
        ),
        time_series(
            "Evictions",
            "Cached blocks forgotten to make room. Many, with a falling hit rate: the cache is too small.",
            (Query(rate("inflight_kv_cache_evictions_total"), "blocks"),),
            "ops",
            width=6,
            alerts=("InflightPrefixHitRateDropped",),
        ),
        time_series(
            "Preemptions",
            "Sequences that lost their blocks (policy max_utilization).",
            (Query(rate("inflight_preemptions_total"), "preemptions"),),
            "ops",
            width=6,
            alerts=("InflightPreemptions",),
        ),
        time_series(
            "Recomputed tokens",
            "Tokens computed again after preemptions: work done twice.",
            (Query(rate("inflight_recomputed_tokens_total"), "tokens"),),
            TOKENS_PER_SECOND,
            width=6,
            alerts=("InflightPreemptions",),
        ),
    ),
)

SPECULATION = Row(
    "Speculation",
    (
        time_series(
            "Draft tokens",
            "Tokens that were proposed and accepted for requests that have finished.",
            (
                Query(rate("inflight_draft_tokens_total"), "proposed"),
                Query(rate("inflight_accepted_draft_tokens_total"), "accepted"),
            ),
            TOKENS_PER_SECOND,
            width=12,
            height=5,
        ),
        time_series(
            "Sequences with drafts",
            "Beside those that run: for how many speculation pays at the moment. Portable engine only.",
            (
                Query(total("inflight_drafted_sequences"), "with drafts"),
                Query(total("inflight_running_requests"), "running"),
            ),
            "short",
            width=12,
            height=5,
        ),
    ),
)

ENGINE_BOARD = board(
    "inflight-engine",
    "Inflight / Engine and KV cache",
    "What do the engine's steps do, and is its memory enough?",
    (STEPS, BATCH, KV_CACHE, SPECULATION),
)
