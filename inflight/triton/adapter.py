"""Arrays, errors and responses in Triton's terms. With ``metrics``, the only code that speaks its Python API."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from inflight import logs
from inflight.contract import DETOKENIZER, ENGINE, EXPECTATION, MARK
from inflight.engine.request import Output
from inflight.errors import DeploymentError, EngineFailure, InflightError, InvalidRequest, as_told
from inflight.settings.deployment import ENVIRONMENT_VARIABLE, Deployment, load_served
from inflight.triton import process, response_writer
from inflight.triton.request_reader import SubRequest
from inflight.triton.response_writer import Arrays

log = logging.getLogger("inflight")

_kept: deque[Any] = deque(maxlen=256)
"""The last answers to calls from stage to stage. Triton's stub drops each too, a little later, in a thread without
Python's lock (before 24.12): were it the last to hold one, it would free Python's objects beside another thread."""


def deployment() -> Deployment:
    """Return the deployment that this server serves; its directory comes in the environment.

    Every stage asks for it first, so from here on what the stage's process logs is in the server's log, the process
    ends with its server, and nobody else can open the memory in which the two meet.

    Raises:
        DeploymentError: none is named, or it cannot be served.
    """
    loaded = load_served(deployment_directory())
    logs.configure(loaded.observability)
    process.end_with_server()
    process.forget_region()
    return loaded


def deployment_directory() -> Path:
    """Return the directory of the deployment that this server serves. Raises DeploymentError: none is named."""
    directory = os.environ.get(ENVIRONMENT_VARIABLE)
    if not directory:
        raise DeploymentError(f"{ENVIRONMENT_VARIABLE} does not name a deployment directory")
    return Path(directory)


def is_decoupled(args: dict[str, str]) -> bool:
    """Return whether the model that Triton initializes may answer a request more than once."""
    policy = json.loads(args["model_config"]).get("model_transaction_policy", {})
    return bool(policy.get("decoupled", False))


def read_arrays(request: Any) -> Arrays:
    """Return the request's inputs by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def read_parameters(request: Any) -> dict[str, object]:
    """Return the request's parameters: those of its client and Triton's own.

    Raises:
        InvalidRequest: a name or a value among them is not UTF-8; a JSON body over HTTP can have any bytes.
    """
    try:
        text = request.parameters()
    except UnicodeDecodeError:
        raise InvalidRequest("the name or the value of a parameter is not valid UTF-8") from None
    return dict(json.loads(text)) if text else {}


def read_id(request: Any) -> str:
    """Return the request's id, "" if it has none.

    Raises:
        InvalidRequest: it is not UTF-8.
    """
    try:
        return str(request.request_id())
    except UnicodeDecodeError:
        raise InvalidRequest("the request id is not valid UTF-8") from None


def id_to_log(request: Any) -> str:
    """Return the request's id, "" if it has none that can be read."""
    try:
        return read_id(request)
    except InvalidRequest:
        return ""


def response(arrays: Arrays) -> Any:
    """Return a Triton response with these outputs."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])


def error_response(error: Exception, request_id: str) -> Any:
    """Return a Triton error response. Any error but an InflightError is logged, and its text is not sent."""
    told = _told(error, request_id)
    return _error(told.triton_code, told.wire_message())


def _told(error: Exception, request_id: str) -> InflightError:
    if not isinstance(error, InflightError):
        log.exception("a stage failed", exc_info=error, extra={"request_id": request_id})
    return as_told(error)


def _error(code: str, message: str) -> Any:
    known = code in {kind.triton_code for kind in InflightError.__subclasses__()}
    value = getattr(pb_utils.TritonError, code if known else InflightError.triton_code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, value))


class TritonSender:
    """The response side of one Triton request. FINAL goes with the last data: an empty response may lose its flag."""

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._request_id = id_to_log(request)

    def send(self, arrays: Arrays, final: bool) -> None:
        """Send a response, the last one with ``final``."""
        self._sender.send(response(arrays), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)

    def end(self, decoupled: bool = True) -> None:
        """End without data; a request that is not decoupled gets an empty response all the same."""
        empty = () if decoupled else (pb_utils.InferenceResponse([]),)
        self._sender.send(*empty, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def fail(self, error: Exception, stream_key: int | None = None) -> None:
        """Send ``error`` as the last response; see ``streams.Sender``."""
        if stream_key is not None:
            told = _told(error, self._request_id)
            self.send(response_writer.failure_arrays(stream_key, told.triton_code, told.wire_message()), final=True)
            return
        self._sender.send(error_response(error, self._request_id), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def sequence_ended(self, subrequest: SubRequest, output: Output) -> None:
        """Triton is told by the last response alone."""

    def fail_as_told(self, failure: np.ndarray) -> None:
        """Send as the last response what another stage's ``response_writer.failure_arrays`` says."""
        code, message = (part.decode(errors="replace") for part in failure.reshape(-1)[:2])
        self._sender.send(_error(code, message), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""
        return bool(self._sender.is_cancelled())


def stop_stream(inputs: Arrays, request_id: str) -> None:
    """Ask the engine stage to end what these inputs and the id name, with a call from stage to stage."""
    for answer in _call(ENGINE, inputs, [], request_id):
        if answer.has_error():
            log.warning("stop of request %r failed: %s", request_id, answer.error().message())


def announce(announcement: bytes) -> int | None:
    """Tell the detokenizer stage of a request, with a call from stage to stage.

    Returns:
        Its mark, or None where none is left.

    Raises:
        EngineFailure: the call failed.
    """
    [answer] = _call(DETOKENIZER, {EXPECTATION: np.array([[announcement]], np.object_)}, [MARK])
    if answer.has_error():
        raise EngineFailure(f"the detokenizer could not be told of a request: {answer.error().message()}")
    mark: int = pb_utils.get_output_tensor_by_name(answer, MARK).as_numpy().item()
    return None if mark < 0 else mark


def _call(stage: str, inputs: Arrays, outputs: list[str], request_id: str = "") -> list[Any]:
    """Call another stage, and return its answers; the last ones of all are kept."""
    tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
    request = pb_utils.InferenceRequest(
        request_id=request_id, model_name=stage, inputs=tensors, requested_output_names=outputs
    )
    answers = [answer for answer in request.exec(decoupled=True) if answer is not None]
    _kept.extend(answers)
    return answers
