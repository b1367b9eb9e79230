"""Locust users that stream from Inflight over gRPC and over HTTP; docs/locust.md is about them.

    locust -f loadtest/locustfile.py --headless --users 8 --spawn-rate 8 --run-time 30s \
        --scenario chat --host http://127.0.0.1:8000 --grpc-url 127.0.0.1:8001

Each user is one greenlet that sends a request, reads its stream and takes the times, so all users of a process share
one core with each other and with locust. `inflight load` is the exact tool.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import lru_cache, partial
from http.client import HTTPException
from pathlib import Path
from typing import ClassVar

import gevent
import grpc
from geventhttpclient import URL
from grpc.experimental.gevent import init_gevent
from locust import FastHttpUser, User, constant, events, tag, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import CatchResponseError, StopTest
from locust.runners import WorkerRunner
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

import locust_report
from inflight.client.answer import Outputs, read_chunk
from inflight.client.errors import ServerUnreachable, from_wire
from inflight.client.grpc_transport import channel_options, decode_response, encode_request
from inflight.client.http_transport import EVENT, body, error_of, read_event
from inflight.client.request import Request, build_request
from inflight.errors import InflightError
from inflight.load.observation import Observation
from inflight.load.scenario import ScenarioError, load_scenario
from inflight.load.workload import PromptWriter, Session, Workload
from inflight.resources import DEMO, bundled
from inflight.settings.deployment import load_deployment

MODEL = "ensemble"
CONNECT_S = 5.0
PAUSE_AFTER_FAILURE_S = 0.1
"""A user waits so long after a failure, as a session of `inflight load` does, or a dead server would get a flood."""
MOST_WORKERS = 1024
"""Worker i takes the sessions i, i + 1024, i + 2048, ...: no two workers send the same one."""
PLACES_APART = 127
"""Of a trace every worker replays all sessions, and begins so many after the worker before it."""
_logger = logging.getLogger(__name__)
_seen: set[str] = set()
"""Kinds of failures of which one message is in the log."""

init_gevent()  # before any channel is made
locust_report.install()


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser, **_: object) -> None:
    """Add Inflight's options; the page of locust has all but --records in the form that starts a test."""
    parser.add_argument("--scenario", default="fixed", help="Scenario file, or the name of one in loadtest/scenarios")
    parser.add_argument("--grpc-url", default="127.0.0.1:8001", help="gRPC address of the server; --host is HTTP's")
    parser.add_argument("--deployment", default=str(DEMO), help="Deployment that runs there: its tokenizer is used")
    parser.add_argument("--seed", default="", help="Seed of the prompts in place of the scenario's")
    parser.add_argument(
        "--records",
        default="",
        include_in_web_ui=False,
        help="Directory for a JSON line per request, a file per process",
    )


@events.init.add_listener
def check_options(environment: Environment, **_: object) -> None:
    """End at once, with one line, where the options cannot be used; a worker gets its options from the master."""
    if not isinstance(environment.runner, WorkerRunner):
        try:
            workload_of(environment.parsed_options)
        except InflightError as error:
            raise SystemExit(f"inflight: {error}") from None
    gevent.get_hub().loop.update_now()  # or --run-time would count from before the imports, which held the loop up


def workload_of(options: Namespace) -> Workload:
    """Return the sessions of the scenario that the options name.

    Raises:
        InflightError: an option cannot be used; one line.
    """
    if options.seed and not options.seed.isdecimal():
        raise ScenarioError(f"--seed is {options.seed!r}; it must be a whole number, 0 or more")
    return _workload(options.scenario, options.deployment, int(options.seed) if options.seed else None)


@lru_cache
def _workload(scenario: str, deployment: str, seed: int | None) -> Workload:
    writer = PromptWriter.of_checkpoint(load_deployment(bundled(Path(deployment))).model)
    return Workload(load_scenario(Path(scenario)), writer, seed)


@lru_cache
def _stub(url: str) -> GRPCInferenceServiceStub:
    """Return the calls of the server at ``host:port`` or, with TLS, ``grpcs://host:port``; it connects when asked."""
    scheme, _, address = url.rpartition("://")
    options = channel_options(address, CONNECT_S)
    if scheme.lower() == "grpcs":
        return GRPCInferenceServiceStub(grpc.secure_channel(address, grpc.ssl_channel_credentials(), options))
    return GRPCInferenceServiceStub(grpc.insecure_channel(address, options))


class ScenarioUser(User):
    """A user that holds the scenario's sessions one after the other: prompts, lengths, conversations, cancellations.

    How many users there are, and when, is locust's to say: the scenario's phases have no part in it.
    """

    abstract = True
    wait_time = constant(0)
    protocol: ClassVar[str]
    """Type of the whole request in locust's statistics."""
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        try:
            self._workload = workload_of(environment.parsed_options)
        except InflightError as error:
            raise StopTest(str(error)) from None

    def replies(self, request: Request) -> Generator[Outputs]:
        """Send a request and yield its responses; closing the generator cancels the request.

        Raises:
            InflightError: the server's error, or ServerUnreachable.
        """
        raise NotImplementedError

    @tag("stream")
    @task(9)
    def stream(self) -> None:
        """Hold a session of which every answer is streamed."""
        self._converse(stream=True)

    @tag("unary")
    @task(1)
    def unary(self) -> None:
        """Hold a session of which every answer comes whole."""
        self._converse(stream=False)

    def _converse(self, stream: bool) -> None:
        session = self._next_session()
        answers: list[str] = []
        for number, turn in enumerate(session.turns):
            gevent.sleep(turn.think_s)
            one = Observation(session, number, time.perf_counter)
            self._ask(one, answers, stream)
            self._report(one, stream)
            if not one.record.completed:
                break
            answers.append(one.text)

    def _next_session(self) -> Session:
        worker, number = self.environment.runner.worker_index, next(ScenarioUser._numbers)
        if self._workload.scenario.trace:  # every worker replays all of it, each from a place of its own
            return self._workload.session((PLACES_APART * worker + number) % len(self._workload.arrivals))
        return self._workload.session(worker + MOST_WORKERS * number)

    def _ask(self, one: Observation, answers: list[str], stream: bool) -> None:
        """Send one turn and note what comes back; a plan to cancel it after some time is kept."""
        prompt, options = one.session.prompt(one.turn, answers), one.session.options(one.turn)
        request = build_request(prompt, options, stream=stream, request_id=one.record.request_id)
        patience = gevent.Timeout(one.session.turns[one.turn].cancel_after_s, False)
        with one.sending(), patience, closing(self.replies(request)) as replies:
            for outputs in replies:
                one.take(read_chunk(outputs))
                if one.cancel_due:
                    break

    def _report(self, one: Observation, streamed: bool) -> None:
        """Fire the event of one request; log TTFT, ITL and TPOT of a stream that completed."""
        record = one.record
        name = record.class_name if streamed else f"{record.class_name} unary"
        fire = partial(self.environment.events.request.fire, name=name, exception=None, context=self.context())
        whole = {"response_time": 1000 * record.e2e_s, "response_length": len(one.text.encode())}
        context = self.context() | {"record": record}
        if record.outcome == "cancelled":
            fire(request_type="cancelled", **whole | {"context": context})
        elif record.outcome != "completed":
            kind = record.error.partition(":")[0]
            if kind not in _seen:
                _seen.add(kind)
                _logger.warning("the first failure of its kind: %s", record.error)
            fire(request_type=self.protocol, **whole | {"context": context, "exception": CatchResponseError(kind)})
            gevent.sleep(PAUSE_AFTER_FAILURE_S)
        else:
            fire(request_type=self.protocol, **whole | {"context": context})
        if not streamed or record.outcome != "completed" or record.ttft_s is None:
            return
        # Samples have rows of their own, and are no requests: an event would count them in locust's total.
        rows = self.environment.stats
        rows.get(name, "TTFT").log(1000 * record.ttft_s, record.input_tokens or 0)
        for gap_s in record.itl_s:
            rows.get(name, "ITL").log(1000 * gap_s, 1)
        if record.mean_itl_s is not None:
            rows.get(name, "TPOT").log(1000 * record.mean_itl_s, record.output_tokens)


class GrpcUser(ScenarioUser):
    """Streams over gRPC; all users of a process share a channel.

    With gevent each channel keeps a thread busy, and 32 of them delay the first response by a tenth of a second.
    """

    protocol = "gRPC"

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._stub = _stub(environment.parsed_options.grpc_url)

    def replies(self, request: Request) -> Generator[Outputs]:
        """Send a request by ModelStreamInfer and yield its responses."""
        call = self._stub.ModelStreamInfer(iter([encode_request(request, MODEL)]))
        try:
            for message in call:
                if message.error_message:
                    raise from_wire(message.error_message)
                if message.infer_response.outputs:
                    yield decode_response(message.infer_response)
        except grpc.RpcError as error:
            raise from_wire(error.details() or "", error.code().name) from error
        finally:
            call.cancel()


class HttpUser(ScenarioUser, FastHttpUser):
    """Streams over HTTP's generate_stream, by locust's FastHttpUser."""

    protocol = "HTTP"
    host = "http://127.0.0.1:8000"
    connection_timeout = CONNECT_S
    network_timeout = 3600.0

    def replies(self, request: Request) -> Generator[Outputs]:
        """Send a request to generate_stream and yield its responses.

        It takes a connection of FastHttpUser's pool. `self.client` itself would fire an event when the headers have
        come, and its `iter_lines` reads 1024 bytes before it yields a line.
        """
        pool = self.client.client.clientpool.get_client(URL(self.host))
        text, headers = json.dumps(body(request)), {"Content-Type": "application/json"}
        try:
            response = pool.request("POST", f"/v2/models/{MODEL}/generate_stream", body=text.encode(), headers=headers)
            try:
                if response.status_code != 200:
                    raise error_of(response.status_code, bytes(response.read()))
                while line := response.readline(b"\n"):
                    if line.startswith(EVENT):
                        yield read_event(bytes(line))
            finally:
                response.release()
        except (OSError, HTTPException) as error:
            raise ServerUnreachable(f"{self.host}: {error or type(error).__name__}") from error
