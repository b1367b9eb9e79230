"""``inflight serve``: one deployment, one server, one screen that says what is where."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import typer
import yaml
from rich.console import Console

from inflight.addresses import nearest_of
from inflight.errors import DeploymentError
from inflight.gguf.files import is_gguf, locate_model, whole_path
from inflight.hub.names import is_model_name, no_such_path
from inflight.resources import DEMO, bundled
from inflight.serve.gateway import GatewayProcess
from inflight.serve.installation import find_installation
from inflight.serve.log import StageLog
from inflight.serve.scratch import temporary_directory
from inflight.serve.server import TritonServer
from inflight.serve.service import Service, asks_clients
from inflight.settings.deployment import FILE_NAME, Deployment, load_deployment
from inflight.settings.door import DoorSettings

KV_CACHE_LINE = re.compile(r'KV cache(?:, second tier)? in [^"\n]*')
"""Matches what the portable engine logs of its size, in a line of text or of JSON."""
_CHECKPOINT = "config.json"
"""The file that every Hugging Face checkpoint has."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STDERR = 2
_console = Console(stderr=True, highlight=False)
_port = partial(typer.Option, min=1, max=65535)


def serve(
    directory: Annotated[
        str | None,
        typer.Argument(help="Deployment or checkpoint directory, GGUF file, or org/name; the demo by default."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Serve this Hugging Face checkpoint directory, GGUF file, or org/name, with defaults."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; the deployment's by default.")] = None,
    http_port: Annotated[int | None, _port(help="HTTP port; the deployment's by default.")] = None,
    grpc_port: Annotated[int | None, _port(help="gRPC port; the deployment's by default.")] = None,
    metrics_port: Annotated[int | None, _port(help="Metrics port; the deployment's by default.")] = None,
    status_port: Annotated[int | None, _port(help="Port of /ready and its like; the deployment's by default.")] = None,
    gateway_port: Annotated[int | None, _port(help="Port of OpenAI's API; the deployment's by default.")] = None,
    triton: Annotated[Path | None, typer.Option(help="Triton installation to use instead of the embedded one.")] = None,
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option(help="Format of the log lines; the deployment's by default.", show_default=False),
    ] = None,
    no_metrics: Annotated[bool, typer.Option("--no-metrics", help="Serve no Prometheus metrics.")] = False,
    door: Annotated[
        bool | None, typer.Option("--door/--no-door", help="Have Envoy own the ports; the deployment's by default.")
    ] = None,
    behind_a_door: Annotated[
        bool, typer.Option("--behind-a-door", help="Another door stands before this one; needs the door.")
    ] = False,
    no_gateway: Annotated[bool, typer.Option("--no-gateway", help="Serve no OpenAI API.")] = False,
) -> None:
    """Serve a deployment until Ctrl-C."""
    ports: dict[str, Any] = {"host": host, "http_port": http_port, "grpc_port": grpc_port}
    ports |= {"metrics_port": metrics_port, "status_port": status_port}
    overrides = {name: value for name, value in ports.items() if value is not None}
    shown: dict[str, Any] = {"metrics": False} if no_metrics else {}
    shown |= {"log_format": log_format} if log_format else {}
    front: dict[str, Any] = {"port": gateway_port} if gateway_port else {}
    front |= {"enabled": False} if no_gateway else {}
    logging.basicConfig(format="inflight: %(message)s")
    logging.getLogger("inflight.serve").setLevel(logging.INFO)
    signals = StopSignals()
    try:
        with temporary_directory("inflight-deployment-") as scratch:
            chosen = _choose(directory, model, Path(scratch))
            deployment = override_server(load_deployment(chosen), overrides)
            observability = deployment.observability.model_copy(update=shown)  # which the stages are told
            gateway = deployment.gateway.model_copy(update=front)
            sections = {"observability": observability, "gateway": gateway}
            sections["door"] = _override_door(deployment.door, door, behind_a_door)
            deployment = deployment.model_copy(update=sections)
            _serve(chosen, deployment, triton, signals)
    except DeploymentError as error:
        _fail(str(error))
    except OSError as error:  # of what is written at start: a full disk, say
        _fail(f"{error.filename or 'the system'}: {error.strerror or error}")


def _fail(reason: str) -> NoReturn:
    _console.print(f"inflight: {reason}", style="red", soft_wrap=True, markup=False)
    raise typer.Exit(1)


def override_server(deployment: Deployment, overrides: dict[str, Any]) -> Deployment:
    """Return the deployment with other values of ``server``."""
    return deployment.model_copy(update={"server": deployment.server.model_copy(update=overrides)})


def _override_door(settings: DoorSettings, enabled: bool | None, behind_a_door: bool) -> DoorSettings:
    chosen: dict[str, Any] = {} if enabled is None else {"enabled": enabled}
    chosen |= {"behind_a_door": True} if behind_a_door else {}
    found = settings.model_copy(update=chosen)
    if behind_a_door and not found.enabled:
        raise DeploymentError("--behind-a-door needs --door, or `door.enabled` in the deployment")
    return found


def _choose(directory: str | None, model: str | None, scratch: Path) -> Path:
    """Return the deployment directory to serve; one is made in ``scratch`` for a checkpoint.

    Both are taken as they were typed: ``./org/name`` is a directory, ``org/name`` may be the name of a model.

    Raises:
        DeploymentError: there is neither a deployment nor a checkpoint where one is named.
    """
    if directory is not None and model is not None:
        raise DeploymentError("give a deployment directory or --model, not both")
    typed = next(one for one in (model, directory, str(DEMO)) if one is not None)
    named = bundled(Path(typed)) if model is None else Path(typed)
    if not named.is_dir() and not (is_gguf(named) and named.is_file()):
        named = _find_model(named, typed)
    if model is None and (named / FILE_NAME).exists():
        return named
    found = locate_model(named)
    if not is_gguf(found) and not (found / _CHECKPOINT).is_file():
        files = _CHECKPOINT if model else f"{FILE_NAME} of a deployment and no {_CHECKPOINT}"
        raise DeploymentError(f"{named} has no {files} of a Hugging Face checkpoint")
    (scratch / FILE_NAME).write_text(yaml.safe_dump({"model": str(whole_path(found))}))
    return scratch


def _find_model(named: Path, typed: str) -> Path:
    """Return where the model of a hub is that was typed; it is pulled if it is not here yet.

    Raises:
        DeploymentError: no model is called so, or it cannot be had.
    """
    if named.exists() or not is_model_name(typed):
        raise DeploymentError(no_such_path(named))
    from inflight.hub.serving import model_to_serve  # and what speaks HTTP, which a start from a directory leaves alone

    return model_to_serve(typed, _console)


class StartScreen:
    """Shows a start as it happens: what the stages say, one line each, and the seconds beside a spinner.

    Warnings come last, right before the line that says that the server is ready, or why it is not.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._status = console, console.status("starting")
        self._began, self._log, self._warnings = time.monotonic(), StageLog(), list[str]()

    @property
    def seconds(self) -> float:
        """Since the start began."""
        return time.monotonic() - self._began

    def look(self, server: TritonServer) -> None:
        """Show what is new."""
        self._status.update(f"starting ({self.seconds:.1f} s)")
        if not server.started:
            return
        for line in self._log.new_lines(server.log_path):
            if line.level == "INFO" and not KV_CACHE_LINE.match(line.message):  # which comes with all that is ready
                self._console.print(f"{self.seconds:6.1f} s  {line.message}", markup=False, soft_wrap=True)
            elif line.level == "WARNING":
                self._warnings.append(line.message)

    def __enter__(self) -> StartScreen:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
        for warning in self._warnings:
            self._console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


class StopSignals:
    """The signals that ask `inflight serve` to stop, raised as KeyboardInterrupt, but not amid what must be done whole.

    SIGINT is taken even where it is ignored, as a shell starts background jobs. An ignored SIGHUP stays ignored, as
    `nohup` has it.
    """

    def __init__(self) -> None:
        self._terminal = os.isatty(_STDERR)
        self._held = self._asked = False
        for number in _STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._take)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise what arrives within only at its end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._asked:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """Ignore them from here on: nothing interrupts any more."""
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._terminal:  # the terminal has gone: each word to it would be an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)
        self._asked = True
        if not self._held:
            raise KeyboardInterrupt


def _serve(directory: Path, deployment: Deployment, triton: Path | None, signals: StopSignals) -> None:
    service, screen = Service(directory, deployment, find_installation(triton), signals.held), StartScreen(_console)
    try:
        with screen:
            service.start(lambda: screen.look(service.server))
        with signals.held():  # what is interrupted is printed once more with what comes next
            _console.print(_banner(service, screen.seconds), markup=False, soft_wrap=True)
        service.keep_serving()
    except KeyboardInterrupt:
        signals.ignore()  # a second Ctrl-C must not interrupt the clean-up: nothing is left running
        _console.print("stopping")
        service.drain()
    finally:
        signals.ignore()
        service.stop()


def _banner(service: Service, seconds: float) -> str:
    running, gateway, deployment = service.server, service.gateway, service.deployment
    server, secure = deployment.server, "s" if deployment.door.tls.certificate else ""
    host = nearest_of(server.host)
    http = f"http{secure}://{host}:{server.http_port}"
    grpc = f"{'grpcs://' if secure else ''}{host}:{server.grpc_port}"
    metrics = f"http{secure}://{host}:{server.metrics_port}/metrics" if running.metrics else "off"
    told = "ready" if asks_clients(deployment) else "status"
    status = f"\n  status   http://{host}:{server.status_port}/{told}" if server.status_port else ""
    memory = "".join(f"\n  {line}" for line in KV_CACHE_LINE.findall(running.log_path.read_text(errors="replace")))
    body = '{"text_input": "What is in-flight batching?", "max_tokens": 64}'
    openai = f"http{secure}://{nearest_of(deployment.gateway.host or server.host)}:{deployment.gateway.port}"
    return f"""\
ready in {seconds:.1f} s on {server.host}: {deployment.model}
  OpenAI   {f"{openai}/v1, log {gateway.log_path}" if gateway else "off"}
  HTTP     {http}
  gRPC     {host}:{server.grpc_port}
  metrics  {metrics}{status}
  log      {running.log_path}{memory}
try:
{f"  {_openai_call(gateway, openai)}{chr(10)}" if gateway else ""}\
  curl -s {http}/v2/models/ensemble/generate -d '{body}'
  {Path(sys.argv[0])} chat --url {grpc}
Ctrl-C stops it."""


def _openai_call(gateway: GatewayProcess, url: str) -> str:
    """Return a command that shows OpenAI's API."""
    key = " -H 'authorization: Bearer KEY'" if gateway.needs_key else ""
    body = json.dumps(
        {"model": gateway.model_name, "messages": [{"role": "user", "content": "What is in-flight batching?"}]}
    )
    return f"curl -s {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'"
