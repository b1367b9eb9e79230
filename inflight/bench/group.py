"""``inflight bench``: the benchmarks of the client and of the server's parts."""

from __future__ import annotations

from inflight.bench.commands import engine, headlines, recovery, scheduler, soak, soak_server
from inflight.bench.hostile.command import hostile
from inflight.load.commands import bench

for _command in (engine, headlines, scheduler, soak, hostile, recovery, soak_server):
    bench.command()(_command)
