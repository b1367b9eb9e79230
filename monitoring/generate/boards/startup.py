"""Start-up: what runs, since when, how long its start took, and is it alive?"""

from __future__ import annotations

from monitoring.generate.health import HEARTBEAT_S
from monitoring.generate.panels import Row, bar_gauge, board, label_table, number, time_series
from monitoring.generate.promql import Query, selector

WHAT = Row(
    "What runs",
    (
        label_table(
            "Build",
            "What each server serves, with which engine and version.",
            Query(selector("inflight_build_info")),
            width=16,
            height=6,
        ),
        number(
            "Running for",
            "Time since the last stage was ready.",
            Query(f"time() - max by (instance) ({selector('inflight_start_time_seconds')})", "{{instance}}"),
            "s",
            height=6,
            alerts=("InflightRestartLoop",),
        ),
    ),
)

START = Row(
    "Start",
    (
        bar_gauge(
            "Start by phase",
            "Duration of each stage's start by phase; the stages start side by side.",
            Query(f"max by (model, phase) ({selector('inflight_startup_seconds')})", "{{model}}: {{phase}}"),
            "s",
            width=16,
        ),
        number(
            "Longest start",
            "The slowest stage's whole start, all phases together.",
            Query(f"max(sum by (instance, model) ({selector('inflight_startup_seconds')}))", "seconds"),
            "s",
        ),
    ),
)

LIFE = Row(
    "Life",
    (
        time_series(
            "Up and ready",
            "1: the metrics port answers (up), GET /v2/health/ready answers 200 (ready).",
            (
                Query('up{job="inflight", instance=~"$instance"}', "{{instance}} up"),
                Query('up{job="inflight-ready", instance=~"$instance"}', "{{instance}} ready"),
            ),
            alerts=("InflightTargetDown", "InflightTargetGone", "InflightNotReady", "InflightMetricsMissing"),
        ),
        time_series(
            "Age of the heartbeat",
            "Time since the process of each stage last showed that it lives. Triton stays ready when one dies.",
            (
                Query(
                    f"time() - max by (instance, model) ({selector('inflight_heartbeat_time_seconds')})",
                    "{{instance}} {{model}}",
                ),
            ),
            "s",
            limit=HEARTBEAT_S,
            alerts=("InflightStageDead",),
        ),
        time_series(
            "Restarts",
            "Starts seen within an hour.",
            (Query(f"max by (instance) (changes({selector('inflight_start_time_seconds')}[1h]))", "{{instance}}"),),
            alerts=("InflightRestartLoop",),
        ),
    ),
)

MACHINE = Row(
    "Machine",
    (
        time_series(
            "CPU",
            "Busy share of the machine's processors, as Triton sees it.",
            (Query(selector("nv_cpu_utilization"), "{{instance}}"),),
            "percentunit",
            width=12,
        ),
        time_series(
            "Memory",
            "Used share of the machine's memory, as Triton sees it.",
            (
                Query(
                    f"{selector('nv_cpu_memory_used_bytes')} / {selector('nv_cpu_memory_total_bytes')}", "{{instance}}"
                ),
            ),
            "percentunit",
            width=12,
        ),
    ),
)

STARTUP = board(
    "inflight-startup",
    "Inflight / Start-up",
    "What runs, since when, how long did its start take, and is it alive?",
    (WHAT, START, LIFE, MACHINE),
)
