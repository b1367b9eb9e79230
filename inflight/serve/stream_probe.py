"""Asks a server again and again, as a client would, whether it still answers on streams.

Triton has one thread for all streams of gRPC, and one for what the engine's process says. Where the two wait for each
other, no request is answered any more, over no protocol, while the server takes connections and tells that it lives.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from inflight.contract import ENGINE

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2

PAUSE_S = 5.0
_NOBODYS = "inflight-serve-liveness"
"""The id of a request that nobody has sent."""


def question() -> service_pb2.ModelInferRequest:
    """Return what is asked: that the engine stops a request that it does not have.

    Upstream's engine does not take it without a prompt.
    """
    from tritonclient.grpc import service_pb2  # as below

    request = service_pb2.ModelInferRequest(model_name=ENGINE, id=_NOBODYS)
    request.inputs.add(name="stop", datatype="BOOL", shape=[1, 1])
    request.raw_input_contents.append(b"\1")
    for name in ("input_ids", "input_lengths", "request_output_len"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 1])
        request.raw_input_contents.append((1).to_bytes(4, "little"))
    return request


class StreamProbe:
    """Asks in a thread, every ``PAUSE_S``.

    The question goes the way of every request, to the engine's process and back, but waits for no place and no step. It
    counts as a request in Triton's metrics, and not in Inflight's. Whatever comes back is an answer: the end of the
    connection too, since it is for others to see that the server has ended.
    """

    def __init__(self, host: str, port: int) -> None:
        """Ask the server whose gRPC port is ``port``; ``host`` is an address of this machine, as URLs have it."""
        self._address = f"{host}:{port}"
        self._ending = threading.Event()
        self._asked = 0
        self.waits_for: int | None = None
        """The number of the question that is not answered yet; None: all are."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="stream probe", daemon=True).start()

    def end(self) -> None:
        """Have the thread end, when the question is answered that it may have asked."""
        self._ending.set()

    def _run(self) -> None:
        import grpc  # the two take a second, for which no start and no other command is to wait
        from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(self._address, options) as channel:
            ask = GRPCInferenceServiceStub(channel).ModelStreamInfer
            while not self._ending.wait(PAUSE_S):
                self._asked += 1
                self.waits_for = self._asked
                with contextlib.suppress(grpc.RpcError):
                    list(ask(iter([question()])))
                self.waits_for = None
