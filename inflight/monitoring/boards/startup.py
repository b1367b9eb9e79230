"""Start-up: what runs, since when, how long its start took, and is it alive?"""

from __future__ import annotations

from inflight.monitoring.health import HEARTBEAT_S
from inflight.monitoring.panels import Dashboard, Panel, Query, Row, selector

WHAT = Row(
    "What runs",
    (
        Panel(
            "Build",
            "What each server serves, with which engine and version.",
            (Query(selector("inflight_build_info")),),
            kind="table",
            width=16,
            height=6,
        ),
        Panel(
            "Running for",
            "Time since the last stage was ready.",
            (Query(f"time() - max by (instance) ({selector('inflight_start_time_seconds')})", "{{instance}}"),),
            "s",
            "stat",
            8,
            6,
            alerts=("InflightRestartLoop",),
        ),
    ),
)

START = Row(
    "Start",
    (
        Panel(
            "Start by phase",
            "Duration of each stage's start by phase; the stages start side by side.",
            (Query(f"max by (model, phase) ({selector('inflight_startup_seconds')})", "{{model}}: {{phase}}"),),
            "s",
            "bargauge",
            16,
        ),
        Panel(
            "Longest start",
            "The slowest stage's whole start, all phases together.",
            (Query(f"max(sum by (instance, model) ({selector('inflight_startup_seconds')}))", "seconds"),),
            "s",
            "stat",
            8,
        ),
    ),
)

LIFE = Row(
    "Life",
    (
        Panel(
            "Up and ready",
            "1: the metrics port answers (up), GET /v2/health/ready answers 200 (ready).",
            (
                Query('up{job="inflight", instance=~"$instance"}', "{{instance}} up"),
                Query('up{job="inflight-ready", instance=~"$instance"}', "{{instance}} ready"),
            ),
            alerts=("InflightTargetDown", "InflightTargetGone", "InflightNotReady", "InflightMetricsMissing"),
        ),
        Panel(
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
        Panel(
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
        Panel(
            "CPU",
            "Busy share of the machine's processors, as Triton sees it.",
            (Query(selector("nv_cpu_utilization"), "{{instance}}"),),
            "percentunit",
            width=12,
        ),
        Panel(
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

STARTUP = Dashboard(
    "inflight-startup",
    "Inflight / Start-up",
    "What runs, since when, how long did its start take, and is it alive?",
    (WHAT, START, LIFE, MACHINE),
)
