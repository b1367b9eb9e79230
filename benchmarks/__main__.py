"""``make bench ARGS=...``: the benchmarks of Inflight and of its parts, one command for each."""

from __future__ import annotations

import os

import typer

from benchmarks import engine_commands, server_commands
from benchmarks.door import door
from benchmarks.faults.command import faults, rolling
from benchmarks.foreign.command import foreign
from benchmarks.gateway.command import gateway
from benchmarks.guided.command import guided
from benchmarks.native.command import native
from benchmarks.peers.command import peers
from benchmarks.planned import planned
from benchmarks.profile.command import profile
from benchmarks.published.command import published
from benchmarks.suite import suite

bench = typer.Typer(help="Measure Inflight.", add_completion=False, pretty_exceptions_enable=False)
for _command in (
    engine_commands.adapter,
    engine_commands.engine,
    engine_commands.headlines,
    engine_commands.hybrid,
    engine_commands.scheduler,
    engine_commands.soak,
    door,
    foreign,
    guided,
    gateway,
    native,
    peers,
    planned,
    profile,
    published,
    server_commands.pipeline,
    server_commands.serving_cost,
    server_commands.tokenizer,
    server_commands.observability,
    server_commands.locust,
    server_commands.quality_drift,
    faults,
    rolling,
    server_commands.resume,
    server_commands.stop,
    server_commands.soak_server,
    server_commands.soak_crashes,
    server_commands.hostile,
    server_commands.attacks,
    server_commands.beside,
    suite,
):
    bench.command()(_command)

if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the commands report what fails in one line, and gRPC not at all
    bench(prog_name="python -m benchmarks")
