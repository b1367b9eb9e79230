"""The client programs of the upstream TensorRT-LLM ensemble, rebuilt from what they send, read and check.

Each class is one program; its fields are the program's options, with their defaults.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

PERF_OUTPUTS = (
    "kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns "
    "first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens "
    "total_draft_tokens"
).split()


def tensor(name: str, array: np.ndarray, module: Any = grpc) -> Any:
    """Return an input as the upstream tools prepare it."""
    one = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    one.set_data_from_numpy(array)
    return one


def strings(values: list[str]) -> np.ndarray:
    """Return BYTES [1, n]."""
    return np.array([[value.encode() for value in values]], object)


def scalar(reply: grpc.InferResult, name: str) -> int:
    """Return an index of a reply; 0 where it has none."""
    index = reply.as_numpy(name)
    return 0 if index is None else int(index[0][0])


@dataclass(kw_only=True)
class Options:
    """What both programs can be asked for, and how they send it."""

    streaming: bool = False
    num_return_sequences: int | None = None
    beam_width: int = 1
    temperature: float = 1.0
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    request_id: str = ""
    exclude_input_in_output: bool = False
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_perf_metrics: bool = False
    replies: list[grpc.InferResult] = field(default_factory=list)

    def _scalars(self, flags: str = "") -> dict[str, Any]:
        """Return the common inputs and ``flags``; penalties that are not given and flags that are not set stay away."""
        scalars: dict[str, Any] = {"beam_width": np.int32(self.beam_width), "temperature": np.float32(self.temperature)}
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:
                scalars[name] = np.float32(getattr(self, name))
        usual = "return_log_probs return_context_logits return_generation_logits return_perf_metrics"
        scalars |= {name: np.bool_(True) for name in f"{usual} {flags}".split() if getattr(self, name)}
        if self.num_return_sequences is not None:
            scalars["num_return_sequences"] = np.int32(self.num_return_sequences)
        return scalars


@dataclass
class TextClient(Options):
    """`end_to_end_grpc_client.py`: talks to `ensemble` in text, always over a gRPC stream."""

    url: str
    prompt: str | list[str]
    output_len: int = 100
    stop_words: list[str] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    embedding_bias_words: list[str] = field(default_factory=list)
    embedding_bias_weights: list[float] = field(default_factory=list)
    overwrite_output_text: bool = False
    batch_inputs: bool = False
    end_id: int | None = None
    pad_id: int | None = None

    def run(self) -> list[str]:
        """Return the texts of all prompts, one after another: of each its sequences, or its beams."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        requests = [prompts] if self.batch_inputs else [[prompt] for prompt in prompts]
        with grpc.InferenceServerClient(self.url) as client:
            return [text for request in requests for texts in self._ask(client, request) for text in texts]

    def _ask(self, client: grpc.InferenceServerClient, prompts: list[str]) -> list[list[str]]:
        inbox: queue.Queue[Any] = queue.Queue()
        client.start_stream(callback=lambda result, error: inbox.put(error or result))
        client.async_stream_infer(
            "ensemble", self._inputs(prompts), outputs=self._outputs(), request_id=self.request_id
        )
        client.stop_stream()
        texts = [[""] * (self.num_return_sequences or self.beam_width) for _ in prompts]
        while not inbox.empty():
            reply = inbox.get()
            assert not isinstance(reply, InferenceServerException), reply
            self._read(reply, texts)
        return texts

    def _read(self, reply: grpc.InferResult, texts: list[list[str]]) -> None:
        """Read a reply as the program does: its first text, bytes, is of the row and place that it names."""
        self.replies.append(reply)
        text = reply.as_numpy("text_output")[0].decode("utf-8")
        row, place = (scalar(reply, name) for name in ("batch_index", "sequence_index"))
        joins = self.streaming and self.beam_width == 1 and not self.overwrite_output_text
        texts[row][place] = texts[row][place] + text if joins else text

    def _inputs(self, prompts: list[str]) -> list[Any]:
        rows = len(prompts)
        scalars = self._scalars() | {
            "max_tokens": np.int32(self.output_len),
            "stream": np.bool_(self.streaming),
            "exclude_input_in_output": np.bool_(self.exclude_input_in_output),
        }
        for name in ("end_id", "pad_id"):
            if getattr(self, name) is not None:
                scalars[name] = np.int32(getattr(self, name))
        lists: dict[str, np.ndarray] = {
            name: strings(getattr(self, name))
            for name in ("stop_words", "bad_words", "embedding_bias_words")
            if getattr(self, name)
        }
        if self.embedding_bias_weights:
            lists["embedding_bias_weights"] = np.array([self.embedding_bias_weights], np.float32)
        return [
            tensor("text_input", np.array([[prompt.encode()] for prompt in prompts], object)),
            *(tensor(name, np.full((rows, 1), value)) for name, value in scalars.items()),
            *(tensor(name, np.repeat(array, rows, axis=0)) for name, array in lists.items()),
        ]

    def _outputs(self) -> list[grpc.InferRequestedOutput]:
        names = ["text_output"]
        if self.return_log_probs:
            names += ["cum_log_probs", "output_log_probs"]
        names += [name for name in ("context_logits", "generation_logits") if getattr(self, f"return_{name}")]
        names += ["sequence_index"] if (self.num_return_sequences or 1) > 1 else []
        names += ["batch_index"] if self.batch_inputs else []
        return [grpc.InferRequestedOutput(name) for name in names + (PERF_OUTPUTS if self.return_perf_metrics else [])]


def fire_together(count: int, call: Callable[[], str]) -> list[str]:
    """`test_max_queue_size.py`: do ``call`` from many threads at once; return what each said."""
    said: list[str] = []
    gate = threading.Barrier(count)

    def one() -> None:
        gate.wait()
        said.append(call())

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said
