"""What is told of a request: exactly one end, whatever happens to it; nothing, and no cost, where nothing is asked."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.clock import now_ns
from inflight.engine.request import FinishReason, Output, Request, RequestMetrics
from inflight.errors import EngineFailure, InvalidRequest, as_told
from inflight.logs import JsonFormatter, TextFormatter
from inflight.sampling import SamplingParams
from inflight.settings.deployment import Deployment
from inflight.settings.observability import ObservabilitySettings
from inflight.text.preprocess import RawRequest
from inflight.triton.request_reader import SubRequest
from inflight.triton.tracing.record import RequestTrace, SpanEnd
from inflight.triton.tracing.stages import (
    RequestTraces,
    TracedPostprocessor,
    TracedPreprocessor,
    phases,
)

TRACE = RequestTrace("a" * 32, "b" * 16, "", "", True, 1, "text_completion model")
METRICS = RequestMetrics(10, 20, 30, 70, prompt_tokens=4, cached_tokens=1, generated_tokens=5)


class Tracer:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.children: list[tuple[str, int, int]] = []
        self.ends: list[SpanEnd] = []

    def begin(self, *_: object) -> RequestTrace:
        return TRACE

    def child(self, trace: RequestTrace, name: str, start_ns: int, end_ns: int, attributes: object) -> None:
        self.children.append((name, start_ns, end_ns))

    def end(self, trace: RequestTrace, end: SpanEnd, end_ns: int) -> None:
        self.ends.append(end)


class Sender:
    """Keeps what is sent, or cannot send."""

    def __init__(self, broken: bool = False) -> None:
        self.sent: list[dict[str, np.ndarray]] = []
        self.errors: list[Exception] = []
        self._broken = broken

    def send(self, arrays: dict[str, np.ndarray], final: bool) -> None:
        if self._broken:
            raise RuntimeError("the request has gone")
        self.sent.append(arrays)

    def fail(self, error: Exception, stream_key: int | None = None) -> None:
        self.errors.append(error)

    def is_cancelled(self) -> bool:
        return False

    def sequence_ended(self, subrequest: SubRequest, output: Output) -> None:
        pass


def deployment(**observability: Any) -> Deployment:
    return Deployment(model=Path("model"), observability=ObservabilitySettings(**observability))


def last(**arrays: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays of a sequence's last response."""
    return {"output_ids": np.zeros((1, 1, 1), np.int32), "finish_reason": np.array([[b"stop"]], object)} | arrays


def subrequest() -> SubRequest:
    return SubRequest(Request([1, 2, 3, 4], SamplingParams(max_tokens=8)), 0, 0)


def traced(tracer: Tracer, sender: Sender, arrays: dict[str, np.ndarray] | None = None) -> Any:
    traces = RequestTraces(deployment(log_requests="info"), tracer)  # type: ignore[arg-type]
    return traces.sender(sender, arrays or {}, {}, "id")


def finish(outer: Any) -> None:
    """End the one sequence of a request, as the response streams do."""
    one = subrequest()
    outer.sequence_ended(one, Output(one.request.key, finish_reason=FinishReason.STOP, metrics=METRICS))


def test_the_detokenizer_is_told_how_the_span_ends() -> None:
    tracer, sender = Tracer(), Sender()
    outer = traced(tracer, sender, {"trace_context": TRACE.to_tensor(1)})
    finish(outer)
    outer.send(last(), final=True)
    trace, end = RequestTrace.from_tensor(sender.sent[0]["trace_span"])
    assert trace == TRACE
    assert end is not None
    assert end.attributes["inflight.outcome"] == "stop"
    assert end.attributes["gen_ai.usage.output_tokens"] == 5
    assert tracer.children == [("queue", 10, 20), ("prefill", 20, 30), ("decode", 30, 70)]
    assert tracer.ends == [], "the span is the detokenizer's to end"


def test_a_request_that_fails_while_its_answer_is_sent_ends_once() -> None:
    tracer, sender = Tracer(), Sender(broken=True)
    outer = traced(tracer, sender)
    finish(outer)
    with pytest.raises(RuntimeError):
        outer.send(last(), final=True)
    outer.fail(EngineFailure("the response could not be written"))
    (end,) = tracer.ends
    assert end.error == "INTERNAL: the response could not be written"
    assert end.attributes["error.type"] == "internal"


def test_a_fault_of_the_tracing_is_not_the_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inflight.requests")
    tracer, sender = Tracer(), Sender()
    tracer.child = None  # type: ignore[assignment,method-assign]
    outer = traced(tracer, sender)
    finish(outer)
    outer.send(last(), final=True)
    assert len(sender.sent) == 1
    assert [one.getMessage() for one in caplog.records] == ["a request could not be traced", "request finished"]


def test_the_line_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inflight.requests")
    outer = traced(Tracer(), Sender())
    finish(outer)
    outer.send(last(), final=True)
    (record,) = caplog.records
    entry = json.loads(JsonFormatter().format(record))
    assert entry.pop("total_ms") >= 0
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "info",
        "logger": "inflight.requests",
        "message": "request finished",
        "request_id": "id",
        "trace_id": "a" * 32,
        "outcome": "stop",
        "prompt_tokens": 4,
        "cached_tokens": 1,
        "generated_tokens": 5,
        "queue_ms": 0.0,
        "prefill_ms": 0.0,
        "decode_ms": 0.0,
    }
    text = TextFormatter().format(record)
    assert "INFO inflight.requests: request finished request_id=id" in text
    assert "outcome=stop" in text


def test_a_client_cannot_write_lines_of_the_log() -> None:
    record = logging.makeLogRecord({"msg": "request finished", "request_id": 'a b\nERROR inflight: "forged"\x1b\u2028'})
    line = TextFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert line.endswith(r'request_id="a b\nERROR inflight: \"forged\"\u001b\u2028"')


def test_what_an_error_says_cannot_write_lines_of_the_log_either() -> None:
    said = "forged\x1b[2J\u2028"
    try:
        raise ValueError(said)
    except ValueError:
        record = logging.makeLogRecord({"msg": "%s", "args": (f"{said}\nERROR",), "exc_info": sys.exc_info()})
    first, *rest = TextFormatter().format(record).split("\n")
    assert first.endswith(r"forged\x1b[2J\u2028\nERROR")
    assert rest[-1] == r"ValueError: forged\x1b[2J\u2028"


def test_what_is_not_asked_for_is_not_in_the_way() -> None:
    outputs: dict[str, Any] = {}
    sender, request = Sender(), RawRequest({}, {})
    preprocessor: Any = SimpleNamespace(preprocess=lambda request: outputs)
    off = deployment()
    assert TracedPreprocessor(preprocessor, off, None).preprocess(request) is outputs
    assert RequestTraces(off, None).sender(sender, {}, {}, "id") is sender


def test_a_trace_that_is_not_the_tokenizers_is_refused() -> None:
    fields = json.loads(TRACE.to_tensor(1).item())[0]
    wrong: dict[str, Any] = {"trace_id": "z" * 32, "span_id": "0" * 16, "parent_id": "ab", "trace_state": 7}
    wrong |= {"sampled": 1, "start_ns": 1 << 70, "name": ["chat"]}
    forged = [json.dumps([fields | {name: value}, None]).encode() for name, value in wrong.items()]
    forged.append(json.dumps([fields | {"start_ns": "soon"}, None]).encode())
    assert len(forged) == len(fields) + 1
    for data in (b"", b"[]", b"null", b"[{}, null]", b"\xff", b"[" * 100_000, *forged):
        with pytest.raises(InvalidRequest, match="trace_context is not what"):
            traced(Tracer(), Sender(), {"trace_context": np.array([[data]], object)})
    with pytest.raises(InvalidRequest, match="needs a deployment with observability.trace_endpoint"):
        RequestTraces(deployment(), None).sender(Sender(), {"trace_context": np.array([[b""]], object)}, {}, "id")


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (RequestMetrics(), {}),
        (RequestMetrics(10), {"queue": (10, 99)}),
        (RequestMetrics(10, 20), {"queue": (10, 20), "prefill": (20, 99)}),
        (RequestMetrics(10, 20, 30, 30), {"queue": (10, 20), "prefill": (20, 30)}),
        (RequestMetrics(10, 0, 30, 70), {"decode": (30, 70)}),
    ],
)
def test_phases_are_those_that_were_reached(metrics: RequestMetrics, names: dict[str, tuple[int, int]]) -> None:
    assert phases(metrics, 99) == names


class FakePostprocessor:
    """Answers with nothing, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails

    def postprocess(self, arrays: dict[str, np.ndarray], request_id: str = "") -> dict[str, np.ndarray] | None:
        if self._fails:
            raise RuntimeError("a fault")
        return {} if arrays["output_ids"].size else None

    def is_final(self, arrays: dict[str, np.ndarray]) -> bool:
        return "finish_reason" in arrays


def response(key: int, size: int = 1, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    return {"output_ids": np.zeros((1, 1, size), np.int32), "stream_key": np.array([[key]], np.int64)} | arrays


def test_a_detokenizer_that_fails_ends_the_span_with_the_error() -> None:
    tracer = Tracer()
    span = TRACE.to_tensor(1, SpanEnd({"inflight.outcome": "stop"}))
    with pytest.raises(RuntimeError):
        TracedPostprocessor(FakePostprocessor(fails=True), tracer).postprocess(
            last(**response(1), trace_span=span), "id"
        )  # type: ignore[arg-type]
    (end,) = tracer.ends
    assert end.attributes["inflight.outcome"] == "internal"
    assert end.error == as_told(RuntimeError("a fault")).wire_message(), "the trace has what the client is told"
    assert "a fault" not in end.error


def test_an_end_that_is_not_the_engines_is_refused() -> None:
    trace = json.loads(TRACE.to_tensor(1).item())[0]
    for end in ({"attributes": 5}, {"attributes": {}, "error": 5}, {"n": 1}):
        span = np.array([[json.dumps([trace, end]).encode()]], object)
        with pytest.raises(InvalidRequest, match="trace_span is not what the engine's stage sends"):
            TracedPostprocessor(FakePostprocessor(), Tracer()).postprocess(last(**response(1), trace_span=span))  # type: ignore[arg-type]


def test_streams_are_timed_apart_and_heartbeats_are_not_work() -> None:
    tracer = Tracer()
    postprocessor = TracedPostprocessor(FakePostprocessor(), tracer)  # type: ignore[arg-type]
    moments = [now_ns()]
    for key in (1, 2):
        postprocessor.postprocess(response(key, size=0))
        postprocessor.postprocess(response(key))
        moments.append(now_ns())
    span = TRACE.to_tensor(1)
    for key in (2, 1):
        postprocessor.postprocess(last(**response(key), trace_span=span))
    (_, second, _), (_, first, _) = tracer.children
    assert moments[0] <= first <= moments[1] <= second <= moments[2]
    assert tracer.ends == [], "the request goes on"


def test_a_traceback_is_one_line_of_json() -> None:
    try:
        raise ValueError('a "quoted"\nfault \udcff')
    except ValueError:
        record = logging.getLogger("inflight").makeRecord("inflight", 40, "", 1, "it %s", ("failed",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line.encode())
    assert entry["message"] == "it failed"
    assert entry["traceback"].startswith("Traceback (most recent call last):\n")


@pytest.mark.proof
def test_opentelemetry_is_not_loaded_for_a_stage_without_traces() -> None:
    program = (
        "import sys\n"
        "import inflight.triton.tracing.stages\n"
        "import inflight.logs, inflight.triton.streams\n"
        "import inflight.engine.factory, inflight.text.preprocess, inflight.client, inflight.settings.deployment\n"
        "from pathlib import Path\n"
        "deployment = inflight.settings.deployment.Deployment(model=Path('model'))\n"
        "assert inflight.triton.tracing.stages.make_tracer(deployment) is None\n"
        "from inflight.client.request import trace_headers\n"
        "assert trace_headers(None) == {}\n"
        "sys.exit(any(name.split('.')[0] == 'opentelemetry' for name in sys.modules))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
