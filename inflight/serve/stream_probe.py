"""Asks a server again and again, as a client would, whether it still answers on streams.

Triton has one thread for all streams of gRPC. Where that thread and the one that brings the engine's answers wait for
each other, no request is answered any more, over no protocol, while the server takes connections and tells that it
lives.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tritonclient.grpc import service_pb2

log = logging.getLogger(__name__)

PAUSE_S = 5.0
_CONNECT_MS = 1000
_NO_MODEL = "inflight-serve-asks-for-no-model"


def question() -> service_pb2.ModelInferRequest:
    """Return what is asked: a request to a model that no server has, which the thread for streams refuses by itself.

    So the answer waits for no engine, no metric counts the request, and no log has it.
    """
    from tritonclient.grpc import service_pb2  # not above, since `_run` says when it is imported

    return service_pb2.ModelInferRequest(model_name=_NO_MODEL)


class StreamProbe:
    """Asks in a thread, every ``PAUSE_S``, and tells when an answer has not come for too long.

    The end of a connection counts as an answer, and so does one that does not come about: both are for others to see.
    """

    def __init__(self, host: str, port: int, limit_s: float) -> None:
        """
        Args:
            host: the server's address, as URLs have it.
            port: its gRPC port.
            limit_s: how long an answer may take.
        """
        self._address, self._limit_s = f"{host}:{port}", limit_s
        self._ending = threading.Event()
        self._waits = False
        """Whether a question is not answered yet; the thread writes it, and ``look`` reads it."""
        self._waited_s = 0.0

    def start(self) -> None:
        """Begin to ask."""
        threading.Thread(target=self._run, name="stream probe", daemon=True).start()

    def end(self) -> None:
        """Have the thread end, when the question is answered that it may have asked."""
        self._ending.set()

    def look(self, elapsed_s: float) -> str | None:
        """Return what is wrong with the server, if anything is; the last look was ``elapsed_s`` ago."""
        self._waited_s = self._waited_s + elapsed_s if self._waits else 0.0
        return f"has answered no request for {self._limit_s:g} s" if self._waited_s >= self._limit_s else None

    def _run(self) -> None:
        if self._ending.wait(PAUSE_S):
            return
        import grpc  # the two take a second, for which no other command is to wait, nor a server for its first token
        from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),  # gRPC's name for the time one try may take
            ("grpc.max_reconnect_backoff_ms", _CONNECT_MS),
        ]
        with grpc.insecure_channel(self._address, options) as channel:
            ask = GRPCInferenceServiceStub(channel).ModelStreamInfer
            while True:
                try:
                    self._waits = True
                    list(ask(iter([question()])))
                except grpc.RpcError:
                    pass
                except Exception as error:  # this process lacks a thread or memory, which is not the server's fault
                    log.warning("whether the server answers on streams could not be asked: %s", error)
                finally:
                    self._waits = False
                if self._ending.wait(PAUSE_S):
                    return
