"""Sends hostile requests, and reads what comes of each."""

from __future__ import annotations

import http.client
import re
import socket
from dataclasses import dataclass

import grpc
from tritonclient.grpc import service_pb2

from benchmarks.hostile.over_grpc import GrpcAttack
from benchmarks.hostile.over_http import HttpAttack
from inflight.client.transport import Address

ANSWERED, REFUSED, FAILED, CLOSED, SILENT = "answered", "refused", "failed", "closed", "silent"
"""What comes of a request: a result; an error that is the client's; one that is the server's; no answer; nothing."""
PATIENCE_S = 300.0
_ODD = re.compile(r"\d+|'[^']*'|\s+")
_MESSAGE = re.compile(r'"(?:error|message)":\s*"([^"]*)')
_OVERLOAD = (501, 503, 504)
"""Statuses above 500 that say that something is not served, or not at this moment."""


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    outcome: str
    status: str = ""
    """HTTP's or gRPC's; "" where none came."""
    text: str = ""
    """Of the error."""

    @property
    def gist(self) -> str:
        """The status and the error without its numbers and names, so that errors of one kind are one."""
        message = _MESSAGE.search(self.text)
        return f"{self.status} {_ODD.sub(' ', message[1] if message else self.text)[:120].strip()}"


def over_http(address: Address, attack: HttpAttack, patience_s: float = PATIENCE_S) -> Answer:
    """Send the bytes over a connection of their own, and return what came."""
    try:
        connection = socket.create_connection((address.host, address.port), timeout=patience_s)
    except OSError:
        return Answer(CLOSED)
    with connection:
        try:
            try:
                connection.sendall(attack.wire)
                if not attack.answered:
                    connection.shutdown(socket.SHUT_WR)
            except ConnectionError:
                pass  # refused before its end; the reason may have come
            # An answer to HEAD may name the length of a body that does not come.
            response = http.client.HTTPResponse(connection, method="HEAD" if attack.wire.startswith(b"HEAD ") else None)
            response.begin()
            text = response.read().decode(errors="replace")
        except TimeoutError:
            return Answer(SILENT)
        except (OSError, http.client.HTTPException, ValueError):
            return Answer(CLOSED)
    told = text if '"error"' in text or response.status >= 400 else ""
    return Answer(_kind_of(response.status, told), str(response.status), told)


def _kind_of(status: int, error: str) -> str:
    if status < 400:
        return REFUSED if error else ANSWERED
    return REFUSED if status < 500 or status in _OVERLOAD else FAILED


def over_grpc(channel: grpc.Channel, attack: GrpcAttack, patience_s: float = PATIENCE_S) -> Answer:
    """Make the call, and return what came."""
    timeout = {"timeout": patience_s, "metadata": attack.metadata}
    try:
        if not attack.streams:
            channel.unary_unary(attack.method)(attack.messages[0], **timeout)
            return Answer(ANSWERED, "OK")
        call = channel.stream_stream(attack.method)(iter(attack.messages), **timeout)
        errors = [service_pb2.ModelStreamInferResponse.FromString(message).error_message for message in call]
        said = "\n".join(filter(None, errors))
        return Answer(REFUSED if said else ANSWERED, "OK", said)
    except grpc.RpcError as error:
        code, text = error.code(), error.details() or ""
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and text == "Deadline Exceeded":
            return Answer(SILENT)
        failed = code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        return Answer(FAILED if failed else REFUSED, code.name, text)
