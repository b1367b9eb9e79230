"""Servers over HTTP: how each contender's is started and asked, for the worker that measures it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import Place, cores, variables
from benchmarks.peers.environments import home_of
from benchmarks.peers.jobs import Worker
from benchmarks.peers.variants import OURS, Variant
from inflight.resources import ROOT
from inflight.serve.server import free_ports
from inflight.settings.deployment import FILE_NAME

STREAMS = (1, 8, 32)
"""Clients at once."""
WORDS, OUTPUT = 100, 64
"""Of each prompt, and tokens of each answer."""
REQUESTS = 2
"""Of each client; the only client of one stream sends as many as ``_LEAST``."""
_LEAST = 4
_LENGTH = 256
"""Tokens that a sequence may have."""


def speed_name(streams: int) -> str:
    """Return the name of the speed at so many streams."""
    return f"tokens/s, {streams} streams"


def serve_job(place: Place, variant: Variant, model: Path, seed: int) -> dict[str, Any]:
    """Start a variant's server, ask it at each number of streams, stop it, and return the figures.

    Raises:
        InflightError: the server did not start or answered wrongly, or its environment has not been made.
    """
    ports = free_ports(3)
    command, environment, dialect = SERVERS[variant.contender](place, variant, model.resolve(), ports)
    name = f"{variant.contender}-server"
    worker = Worker(
        name,
        [*place.under, sys.executable, "-m", "benchmarks.peers.workers.http_load"],
        {"PYTHONPATH": str(ROOT)},
        place.folder / f"logs/{name}.log",
    )
    job = {
        "command": command,
        "environment": environment,
        "dialect": dialect,
        "model": str(model.resolve()),
        "port": ports[0],
        "loads": [{"streams": count, "requests": max(REQUESTS * count, _LEAST)} for count in STREAMS],
        "words": WORDS,
        "output": OUTPUT,
        "seed": seed,
    }
    return served(worker.do(job, place.timeout_s))


def served(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the worker's result with a figure's name for each speed, and the rest by the number of streams."""
    rows = {str(row["streams"]): {key: round(value, 3) for key, value in row.items()} for row in result["loads"]}
    return {
        "figures": {speed_name(int(streams)): row["tokens_per_s"] for streams, row in rows.items()},
        "loads": rows,
        "others": round(result["others"], 4),
    }


_Server = tuple[list[str], dict[str, str], str]


def _inflight(place: Place, variant: Variant, model: Path, ports: list[int]) -> _Server:
    """Return a server of ours: a deployment with the variant's settings and, but for the ports, the defaults."""
    directory = place.folder / f"deployment-{variant.name.replace(' ', '-')}"
    directory.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps(dict(variant.settings)))
    if settings.get("engine", {}).get("threads") == "all":
        settings["engine"]["threads"] = len(cores())
    server = dict(zip(("http_port", "grpc_port", "metrics_port"), ports, strict=True))
    own = {"server": {"host": "127.0.0.1", **server}, "gateway": {"enabled": False}}
    deployment = {"model": str(model), **own, **settings}
    (directory / FILE_NAME).write_text(json.dumps(deployment) + "\n")
    return [sys.executable, "-m", "inflight", "serve", str(directory.resolve())], {}, OURS


def _vllm(place: Place, variant: Variant, model: Path, ports: list[int]) -> _Server:
    home = home_of("vllm")
    options = ["--host", "127.0.0.1", "--port", str(ports[0]), "--dtype", variant.settings["dtype"]]
    sizes = ["--max-model-len", str(_LENGTH), "--max-num-seqs", str(max(STREAMS))]
    command = [str(home.python.with_name("vllm")), "serve", str(model), *options, *sizes]
    return command, {**variables(home), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, "openai"


def _llama(place: Place, variant: Variant, model: Path, ports: list[int]) -> _Server:
    home, kv = home_of("llama.cpp"), variant.settings["kv"]
    options = ["-m", str(model / "model.gguf"), "--host", "127.0.0.1", "--port", str(ports[0]), "-fa", "on"]
    sizes = ["-np", str(max(STREAMS)), "-c", str(max(STREAMS) * _LENGTH), "-ctk", kv, "-ctv", kv]
    threads = ["-t", str(len(cores())), "-tb", str(len(cores()))]
    command = [str(home.folder.resolve() / "build/bin/llama-server"), *options, *sizes, *threads]
    return command, variables(home), "llama.cpp"


SERVERS: dict[str, Callable[[Place, Variant, Path, list[int]], _Server]] = {
    OURS: _inflight,
    "vllm": _vllm,
    "llama.cpp": _llama,
}
"""For each contender with a server: the command, its variables, and how it is spoken to."""
