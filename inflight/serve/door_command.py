"""``inflight door``: Envoy before several servers of one deployment, or the files that an Envoy elsewhere needs."""

from __future__ import annotations

import logging
import re
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from inflight.errors import DeploymentError
from inflight.serve.door import DoorProcess, Upstreams
from inflight.serve.envoy.bootstrap import public_addresses
from inflight.serve.envoy.files import write_configuration
from inflight.serve.leftovers import sweep
from inflight.serve.server import address_of
from inflight.settings.deployment import Deployment, load_deployment

_REPLICA = re.compile(
    r"(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+):(?P<http>\d{1,5})(:(?P<grpc>\d{1,5}):(?P<gateway>\d{1,5}))?"
)


def door(
    directory: Annotated[Path, typer.Argument(help="Deployment directory, whose `door` and ports count.")],
    replica: Annotated[
        list[str],
        typer.Option(
            help="host:port of a server's door, or host:http_port:grpc_port:gateway_port of a server without one; "
            "repeat for each."
        ),
    ],
    host: Annotated[str | None, typer.Option(help="Address to listen on; the deployment's by default.")] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Write Envoy's files into this directory, and run nothing: envoy.json and others."),
    ] = None,
    seen_as: Annotated[
        Path | None,
        typer.Option(help="Where Envoy will find that directory, as in a container; by default where it is."),
    ] = None,
) -> None:
    """Serve the ports of a deployment from several servers, by turns, until Ctrl-C."""
    logging.basicConfig(format="inflight: %(message)s", level=logging.INFO)
    try:
        if seen_as is not None and write is None:
            raise DeploymentError("--seen-as needs --write")
        replicas = [_replica(one) for one in replica]
        deployment = _with_door(load_deployment(directory), host)
        if write is None:
            _run(deployment, replicas)
        else:
            write.mkdir(parents=True, exist_ok=True)
            addresses = public_addresses(deployment, address_of(deployment.server.host))
            write_configuration(write, deployment, replicas, addresses, seen_as)
    except DeploymentError as error:
        typer.secho(f"inflight: {error}", fg="red", err=True)
        raise typer.Exit(1) from None


def _with_door(deployment: Deployment, host: str | None) -> Deployment:
    server = deployment.server.model_copy(update={"host": host or deployment.server.host})
    return deployment.model_copy(
        update={"server": server, "door": deployment.door.model_copy(update={"enabled": True})}
    )


def _replica(text: str) -> Upstreams:
    """Return where a server takes requests.

    Raises:
        DeploymentError: the text does not say that.
    """
    match = _REPLICA.fullmatch(text)
    ports = match.group("http", "grpc", "gateway") if match else ()
    if match is None or not all(1 <= int(port) <= 65535 for port in ports if port):
        raise DeploymentError(f"--replica {text}: it must be host:port or host:http_port:grpc_port:gateway_port")
    host, http, grpc, gateway = match["host"], match["http"], match["grpc"] or match["http"], match["gateway"]
    return Upstreams(f"{host}:{http}", f"{host}:{grpc}", f"{host}:{gateway or http}", None)


def _run(deployment: Deployment, replicas: list[Upstreams]) -> None:
    """Run the door until a signal asks it to stop; then requests are refused, and those that run have their time."""
    process, asked = DoorProcess(deployment, *replicas), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    sweep()
    process.check()
    try:
        process.start()
        process.wait_ready()
        typer.echo(f"ready: {', '.join(process.addresses)} from {len(replicas)} servers. Ctrl-C stops it.", err=True)
        asked.wait()
        process.begin_drain()
        process.wait_idle(deployment.server.exit_timeout_s)
    finally:
        process.stop()
