"""`inflight_batcher_llm_client.py`, rebuilt from what it sends, reads and checks."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpc

from tests.triton.support.upstream_clients import PERF_OUTPUTS, Options, scalar, tensor


@dataclass
class EngineClient(Options):
    """`inflight_batcher_llm_client.py`: talks to `tensorrt_llm` in token ids."""

    url: str
    input_ids: list[int]
    end_id: int = -1
    pad_id: int = 50256
    request_output_len: int = 16
    stop_after_ms: int = 0
    stop_via_request_cancel: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    top_k: int = 1
    top_p: float = 0.0
    requested_outputs: list[str] = field(default_factory=list)
    cancelled: bool = False
    _kept: dict[tuple[str, int], Any] = field(default_factory=dict)

    def run(self) -> list[list[int]]:
        """Send the request, and the stop if one is due; return the token ids of each returned sequence."""
        inbox: queue.Queue[tuple[Any, Any]] = queue.Queue()
        with grpc.InferenceServerClient(self.url) as client:
            if self.streaming or self.num_return_sequences:
                self._run_stream(client, inbox)
            else:
                self._run_unary(client, inbox)
        self._print()
        return self._sequences()

    def _inputs(self) -> list[Any]:
        scalars = self._scalars("return_num_input_tokens return_num_output_tokens exclude_input_in_output") | {
            "input_lengths": np.int32(len(self.input_ids)),
            "request_output_len": np.int32(self.request_output_len),
            "streaming": np.bool_(self.streaming),
            "end_id": np.int32(self.end_id),
            "pad_id": np.int32(self.pad_id),
            "runtime_top_k": np.int32(self.top_k),
            "runtime_top_p": np.float32(self.top_p),
        }
        ids = tensor("input_ids", np.array([self.input_ids], np.int32))
        return [ids, *(tensor(name, np.array([[value]])) for name, value in scalars.items())]

    def _stop_inputs(self) -> list[Any]:
        zero = np.zeros((1, 1), np.int32)
        names = ("input_ids", "input_lengths", "request_output_len")
        return [*(tensor(name, zero) for name in names), tensor("stop", np.ones((1, 1), bool))]

    def _outputs(self) -> list[grpc.InferRequestedOutput] | None:
        return [grpc.InferRequestedOutput(name) for name in self.requested_outputs] or None

    def _run_stream(self, client: grpc.InferenceServerClient, inbox: queue.Queue[tuple[Any, Any]]) -> None:
        client.start_stream(callback=lambda result, error: inbox.put((result, error)))
        client.async_stream_infer(
            "tensorrt_llm",
            self._inputs(),
            outputs=self._outputs(),
            request_id=self.request_id,
        )
        if self.stop_after_ms:
            time.sleep(self.stop_after_ms / 1000)
            while inbox.empty():  # the program's user picks a time that a reply comes within
                time.sleep(0.01)
            if self.stop_via_request_cancel:
                client.stop_stream(cancel_requests=True)
                self._take_all(inbox)
                return
            client.async_stream_infer(
                "tensorrt_llm",
                self._stop_inputs(),
                request_id=self.request_id,
                parameters={"Streaming": self.streaming},
            )
        client.stop_stream()
        self._take_all(inbox)

    def _run_unary(self, client: grpc.InferenceServerClient, inbox: queue.Queue[tuple[Any, Any]]) -> None:
        def send(inputs: list[Any], outputs: Any = None) -> Any:
            return client.async_infer(
                "tensorrt_llm",
                inputs,
                outputs=outputs,
                request_id=self.request_id,
                callback=lambda result, error: inbox.put((result, error)),
                parameters={"Streaming": self.streaming},
            )

        future, expected = send(self._inputs(), self._outputs()), 1
        if self.stop_after_ms:
            time.sleep(self.stop_after_ms / 1000)
            if self.stop_via_request_cancel:
                future.cancel()
            else:
                send(self._stop_inputs())
                expected += 1
        for _ in range(expected):
            self._take(*inbox.get(timeout=30))

    def _take_all(self, inbox: queue.Queue[tuple[Any, Any]]) -> None:
        while not inbox.empty():
            self._take(*inbox.get())

    def _take(self, result: Any, error: Any) -> None:
        if error is not None:
            assert "StatusCode.CANCELLED" in str(error), error
            self.cancelled = True
            return
        if self.requested_outputs:
            assert {output.name for output in result.get_response().outputs} == set(self.requested_outputs)
        is_stream = self.streaming or self.num_return_sequences is not None
        if is_stream and result.as_numpy("output_ids") is None:
            self.cancelled = True
            return
        self._keep(result)
        if result.as_numpy("output_ids") is None:
            self.cancelled = True
        else:
            self.replies.append(result)

    def _keep(self, reply: grpc.InferResult) -> None:
        """Read what was asked for: the program does so with every reply, and keeps the newest of each sequence."""
        place = scalar(reply, "sequence_index")
        for name in self._scores():
            array = reply.as_numpy(name)[0]
            rows = enumerate(array) if self.beam_width > 1 else [(place, array)]
            self._kept |= {(name, row): value for row, value in rows}
        names = ["context_logits"] if self.return_context_logits else []
        self._kept |= {(name, 0): reply.as_numpy(name) for name in names + self._figures()}

    def _scores(self) -> list[str]:
        names = ["cum_log_probs", "output_log_probs"] if self.return_log_probs else []
        return names + (["generation_logits"] if self.return_generation_logits else [])

    def _figures(self) -> list[str]:
        counts = [name for name in ("num_input_tokens", "num_output_tokens") if getattr(self, f"return_{name}")]
        return counts + (PERF_OUTPUTS if self.return_perf_metrics else [])

    def _print(self) -> None:
        """Read what was kept as the program does to print it."""
        places = range(self.num_return_sequences or self.beam_width)
        for name in self._scores():
            np.stack([self._kept[name, place] for place in places])
        if self.return_context_logits:
            assert self._kept["context_logits", 0].ndim == 3
        for name in self._figures():
            float(self._kept[name, 0][0][0])

    def _sequences(self) -> list[list[int]]:
        """Return the ids: those of a stream joined, those that come whole cut to their length."""
        prompt = self.input_ids if self.streaming and not self.exclude_input_in_output else []
        sequences = [list(prompt) for _ in range(self.num_return_sequences or self.beam_width)]
        for reply in self.replies:
            place, ids = scalar(reply, "sequence_index"), reply.as_numpy("output_ids")[0]
            if self.streaming:
                sequences[place] += ids[0].tolist()
                continue
            for beam, length in enumerate(reply.as_numpy("sequence_length")[0]):
                sequences[place + beam] += ids[beam][:length].tolist()
        echo = 0 if self.exclude_input_in_output else len(self.input_ids)
        assert not self.stop_after_ms or all(len(ids) - echo < self.request_output_len for ids in sequences)
        return sequences
