"""Locust's command line: what Inflight adds to it, and what of locust's own a scenario excludes."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from inflight.load.scenario import ScenarioError, find_scenario, load_scenario
from inflight.load.swarm.lane import Settings
from inflight.resources import DEMO

if TYPE_CHECKING:  # importing locust patches the whole process for gevent
    from locust.argument_parser import LocustArgumentParser

_FIXED_BY_SCENARIO = {"num_users": "--users", "spawn_rate": "--spawn-rate", "run_time": "--run-time"}


def add_options(parser: LocustArgumentParser) -> None:
    """Add the options of a load test from a scenario."""
    group = parser.add_argument_group("Inflight")
    group.add_argument("--scenario", default="fixed", help="File, or the name of one in loadtest/scenarios")
    group.add_argument("--grpc-url", default="127.0.0.1:8001", help="gRPC address of the server; --host is HTTP's")
    group.add_argument("--deployment", default=str(DEMO), help="Deployment that runs there: its tokenizer is used")
    group.add_argument("--seed", type=int, default=None, help="Seed in place of the scenario's")
    group.add_argument("--duration-scale", type=float, default=1.0, help="Multiply all durations; rates stay")
    group.add_argument("--result", default=None, help="Directory for figures, requests and report")
    group.add_argument("--server-pid", type=int, default=None, help="Server's process; by its port if it is here")


def settings_of(options: Namespace) -> Settings:
    """Return what the processes that send need.

    Raises:
        ScenarioError: an option cannot be used; one line that names it.
    """
    for name, option in _FIXED_BY_SCENARIO.items():
        if getattr(options, name, None):
            raise ScenarioError(f"{option} and a scenario exclude each other: the scenario's `phases` say it")
    if not 0.001 <= options.duration_scale < math.inf:
        raise ScenarioError(f"--duration-scale is {options.duration_scale:g}: a finite number, at least 0.001")
    if options.seed is not None and options.seed < 0:
        raise ScenarioError(f"--seed is {options.seed}: 0 or more")
    if options.server_pid is not None and not psutil.pid_exists(options.server_pid):
        raise ScenarioError(f"--server-pid is {options.server_pid}: there is no such process")
    path = find_scenario(Path(options.scenario))
    load_scenario(path)
    return Settings(
        scenario=str(path.resolve()),
        deployment=str(Path(options.deployment).resolve()),
        grpc_url=options.grpc_url,
        http_url=options.host or "127.0.0.1:8000",
        seed=options.seed,
        duration_scale=options.duration_scale,
    )


def command_of(options: Namespace) -> str:
    """Return the command that repeats a test; addresses and directories are the user's own."""
    chosen = [
        "locust -f loadtest/locustfile.py",
        *(options.user_classes or []),
        f"--scenario {Path(options.scenario).stem}",
        "" if options.seed is None else f"--seed {options.seed}",
        "" if options.duration_scale == 1 else f"--duration-scale {options.duration_scale:g}",
        f"--processes {options.processes}" if options.processes else "",
    ]
    return " ".join(part for part in chosen if part)
