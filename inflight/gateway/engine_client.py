"""The engine's client: token ids in, token ids out, by one ModelStreamInfer call of gRPC per prompt.

All sequences of a prompt (``n``) come by one call. Closing its iterator has the engine stop the request by its id, so
that all of them end before the next step, whether they wait, prefill or decode. Nothing else of the gateway knows gRPC
or tensors.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import deserialize_bytes_tensor

from inflight import contract
from inflight.client.errors import from_wire
from inflight.client.grpc_transport import channel_options
from inflight.client.request import NUMPY_TYPES
from inflight.errors import EngineFailure, RequestCancelled
from inflight.gateway.workers import off_loop
from inflight.sampling import Guide
from inflight.text.preprocess import word_lists

_CONNECT_TIMEOUT_S = 2.0
_STOP_TIMEOUT_S = 5.0
_AHEAD = 8
"""Answers of a call that wait for a reader; one more is read, and gRPC holds the rest back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and how to continue it; None and empty values ask for nothing."""

    prompt: Sequence[int]
    max_tokens: int
    sequences: int = 1
    stream: bool = True
    """False: each sequence comes whole, in one delta."""
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ignore_length: int = 0
    seed: int | None = None
    min_tokens: int = 0
    end_ids: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the sequence and stay in its output; ``end_ids`` do not."""
    stop_strings: Sequence[str] = ()
    bad_words: Sequence[Sequence[int]] = ()
    bias: np.ndarray | None = None
    """Added to the logits, float32 [vocab]."""
    guide: Guide | None = None
    guide_start_ids: Sequence[int] = ()
    """The guide holds once these tokens have been generated in a row; empty: from the start."""
    log_probs: bool = False
    top_log_probs: int = 0
    prompt_log_probs: int | None = None
    """So many of the likeliest tokens at each position of the prompt; None: no log-probs of the prompt."""
    log_prob_token_ids: Sequence[int] = ()
    pooling: str | None = None
    """``last`` or ``mean``: no token is generated, and the output ``embedding`` comes instead."""
    timed: bool = False
    """Whether the last delta of each sequence says when its first token was made."""
    priority: int = 0
    deadline_ms: int | None = None
    client_id: str = ""
    """Who asks, as the request itself says."""
    client: str = ""
    """Who asks, as the door or an API key says; it goes before ``client_id``."""
    resumed_ids: Sequence[int] = ()
    """Tokens that an earlier run of this request has generated; only what follows them comes."""
    resumed_log_probs: Sequence[float] = ()
    """Theirs, where log-probs are asked for."""
    request_id: str = ""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """W3C headers."""


@dataclass(frozen=True, slots=True)
class EngineDelta:
    """What one response of the engine adds to one sequence."""

    index: int
    """Which of the sequences."""
    tokens: list[int]
    text_limit: int | None
    """With stop strings: how many characters of the generated text may be shown so far; None: all."""
    finish_reason: str | None
    """The last delta of a sequence has one: stop, length or deadline."""
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]]
    """Per new token the likeliest ones, the best first."""
    output_tokens: int
    """Tokens generated so far, as the engine counts them."""
    cached_tokens: int
    """Prompt tokens that came from the prefix cache; with the last delta, before it 0."""
    outputs: Mapping[str, np.ndarray]
    """All tensors of the response."""
    written_tokens: int | None = None
    """Prompt tokens that were written to the prefix cache; with the last delta, where the engine says so."""
    waited_s: float = 0.0
    """With the last delta: seconds from the first call to the arrival at the engine that has served it."""

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the first call to the sequence's first token; None: there is none, or nobody asked."""
        arrived, made = (_scalar(self.outputs, name) for name in ("arrival_time_ns", "first_token_time_ns"))
        return self.waited_s + (made - arrived) / 1e9 if made else None


class EngineClient:
    """One channel to the engine's model, which all requests share."""

    def __init__(self, address: str, model: str = contract.ENGINE) -> None:
        """``address``: ``host:port`` of Triton's gRPC."""
        self._address, self._model = address, model
        self._channel: grpc.aio.Channel | None = None
        self._drains: set[asyncio.Task[None]] = set()
        """The tasks that read abandoned calls to their end."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        """Generate, and yield what comes, to the stream's end; closing the generator stops the request at once.

        Raises:
            InflightError: the engine's error, or that it is away; RequestCancelled where somebody else stopped it.
        """
        message = encode(request, self._model)
        # Without the header `triton_grpc_error`, an error comes without a status, which its message names. With it, the
        # server (2.51) crashes after a few errors on streams.
        call = _Call(self._stub().ModelStreamInfer([message], metadata=tuple(request.trace_context.items())))
        over = False  # whether the engine has ended the request
        try:
            while (answer := await call.read()) is not None:
                if answer.error_message:
                    over = True
                    raise from_wire(answer.error_message)
                if answer.infer_response.outputs:
                    delta = await _read(answer.infer_response)
                    if delta.finish_reason == "cancelled":
                        over = True
                        raise RequestCancelled("the request was cancelled at the engine")
                    yield delta
        except grpc.aio.AioRpcError as error:
            # The transport has ended the call: the engine writes its own errors into the stream.
            raise from_wire(error.details() or "", error.code().name) from error
        finally:
            if not call.ended:
                self._leave(call, request.request_id, over)

    def _leave(self, call: _Call, request_id: str, over: bool) -> None:
        """Have the engine end the request unless it is over, and read the call to its end meanwhile.

        A call that is cancelled while its last response comes may end the server (2.51, by SIGSEGV in its handler of
        streams), and a request that is stopped responds at once. One without an id cannot be stopped.
        """
        if not over and not request_id:
            call.cancel()
            return

        async def leave() -> None:
            calls = [call]
            if not over:
                message = pb.ModelInferRequest(model_name=self._model, id=request_id)
                message.inputs.add(name="stop", datatype=contract.BOOL, shape=[1, 1])
                message.raw_input_contents.append(b"\1")
                calls.append(_Call(self._stub().ModelStreamInfer([message])))
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    for one in calls:
                        await one.drain()
            except TimeoutError:
                pass  # the server does not answer
            finally:
                for one in calls:
                    one.cancel()

        task = asyncio.create_task(leave())
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def close(self) -> None:
        """Close the channel; requests still running on it are cancelled."""
        await asyncio.gather(*self._drains, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _stub(self) -> GRPCInferenceServiceStub:
        if self._channel is None:  # not before the first call: a channel belongs to the event loop it is made in
            options = channel_options(self._address, _CONNECT_TIMEOUT_S)
            self._channel = grpc.aio.insecure_channel(self._address, options)
        return GRPCInferenceServiceStub(self._channel)


class _Call:
    """A stream of answers, read by a task of its own: gRPC cancels a call of which a read is cancelled."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self._call = call
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        """Answers, and at last gRPC's EOF or the error that the call ended with."""
        self._room = asyncio.Semaphore(_AHEAD)
        self._drains = False
        self._reading = asyncio.create_task(self._keep_reading())

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self._reading.done()

    async def read(self) -> pb.ModelStreamInferResponse | None:
        """Return the next answer; None: there is none.

        Raises:
            AioRpcError: the call has ended with an error.
            EngineFailure: the answer is no message.
        """
        answer = await self._answers.get()
        self._room.release()
        if answer is grpc.aio.EOF:
            return None
        if isinstance(answer, BaseException):
            raise answer
        if not isinstance(answer, pb.ModelStreamInferResponse):
            raise EngineFailure("an answer of the engine cannot be parsed")
        return answer

    async def drain(self) -> None:
        """Read what still comes, for nobody, until the call ends in whatever way."""
        self._keep_nothing()
        await asyncio.wait([self._reading])

    def cancel(self) -> None:
        """Cancel the call, if it has not ended."""
        self._keep_nothing()
        self._call.cancel()

    def _keep_nothing(self) -> None:
        self._drains = True
        self._room.release()  # the reading may wait for room

    async def _keep_reading(self) -> None:
        """Put each answer into the queue, and at last the end of the call."""
        try:
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                if not self._drains:
                    await self._room.acquire()
                    self._answers.put_nowait(answer)
            self._answers.put_nowait(answer)
        except (Exception, asyncio.CancelledError) as error:
            self._answers.put_nowait(error)
            self._call.cancel()  # where this task was cancelled, the call may go on


def encode(request: GenerateRequest, model: str) -> pb.ModelInferRequest:
    """Return a request as Triton's message, every tensor with one row, in raw form."""
    message = pb.ModelInferRequest(model_name=model, id=request.request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    if request.client:
        message.parameters[contract.CLIENT].string_param = request.client
    for name, values in tensors_of(request).items():
        dtype = contract.ENGINE_INPUT[name].dtype
        if dtype == contract.BYTES:  # each string behind its length
            raws = [value.encode() for value in values]
            message.inputs.add(name=name, datatype=dtype, shape=[1, len(raws)])
            message.raw_input_contents.append(b"".join(len(raw).to_bytes(4, "little") + raw for raw in raws))
        else:
            array = np.asarray(values, NUMPY_TYPES[dtype])
            message.inputs.add(name=name, datatype=dtype, shape=[1, *array.shape])
            message.raw_input_contents.append(array.tobytes())
    return message


def tensors_of(request: GenerateRequest) -> dict[str, Any]:
    """Return a request's tensors, without the row's dimension; what has its default is left to the engine's own."""
    tensors: dict[str, Any] = {
        "input_ids": request.prompt,
        "request_output_len": [request.max_tokens],
        "streaming": [request.stream],
        "exclude_input_in_output": [True],
        "return_num_output_tokens": [True],
        "return_num_cached_tokens": [True],
    }
    for name in _LISTS:
        if values := getattr(request, name):
            tensors[name] = list(values)
    for name, field_name, default in _SCALARS:
        if (value := getattr(request, field_name)) != default:
            tensors[name] = [value]
    if request.temperature:  # greedy is what a request with none of these is; a seed alone would have it sample
        tensors |= {"temperature": [request.temperature], "runtime_top_p": [request.top_p]}
        tensors |= {"runtime_top_k": [request.top_k]} if request.top_k else {}
        tensors |= {"min_p": [request.min_p]} if request.min_p else {}
        tensors |= {} if request.seed is None else {"seed": [request.seed]}
    if request.stop_token_ids:
        tensors["stop_words_list"] = word_lists([[[token] for token in request.stop_token_ids]])[0]
    if request.bad_words:
        tensors["bad_words_list"] = word_lists([request.bad_words])[0]
    if request.bias is not None:
        tensors["embedding_bias"] = request.bias
    if request.guide is not None:
        tensors["guided_decoding_guide_type"] = [request.guide.kind]
        if request.guide.text:
            tensors["guided_decoding_guide"] = [request.guide.text]
    return tensors


_LISTS = "stop_strings end_ids guide_start_ids log_prob_token_ids resumed_ids resumed_log_probs".split()
"""Tensors of any length, which are not sent where they are empty."""
_SCALARS: tuple[tuple[str, str, Any], ...] = (
    ("num_return_sequences", "sequences", 1),
    ("repetition_penalty", "repetition_penalty", 1.0),
    ("presence_penalty", "presence_penalty", 0.0),
    ("frequency_penalty", "frequency_penalty", 0.0),
    ("prompt_ignore_length", "prompt_ignore_length", 0),
    ("min_tokens", "min_tokens", 0),
    ("return_log_probs", "log_probs", False),
    ("num_top_log_probs", "top_log_probs", 0),
    ("num_prompt_log_probs", "prompt_log_probs", None),
    ("pooling", "pooling", None),
    ("return_perf_metrics", "timed", False),
    ("priority", "priority", 0),
    ("deadline_ms", "deadline_ms", None),
    ("client_id", "client_id", ""),
)
"""Tensors of one value: name, field of the request, and the value that is not sent."""


def decode(message: pb.ModelInferResponse) -> dict[str, np.ndarray]:
    """Return the tensors of a response, in their shapes. Raises EngineFailure: one is not what it says of itself."""
    tensors: dict[str, np.ndarray] = {}
    try:
        for output, raw in zip(message.outputs, message.raw_output_contents, strict=True):
            if output.datatype == contract.BYTES:
                array = deserialize_bytes_tensor(raw)
            else:
                array = np.frombuffer(raw, NUMPY_TYPES[output.datatype])
            tensors[output.name] = array.reshape(tuple(output.shape))
    except (KeyError, ValueError, struct.error) as error:
        raise EngineFailure(f"a response cannot be decoded: {type(error).__name__}: {error}") from error
    return tensors


def read_delta(outputs: Mapping[str, np.ndarray]) -> EngineDelta:
    """Return what a response adds to its sequence."""
    reason, limit = outputs.get("finish_reason"), outputs.get("text_limit")
    log_probs = outputs.get("output_log_probs")
    return EngineDelta(
        index=_scalar(outputs, "sequence_index"),
        tokens=outputs["output_ids"].reshape(-1).tolist() if "output_ids" in outputs else [],
        text_limit=None if limit is None else int(limit.reshape(-1)[0]),
        finish_reason=None if reason is None else reason.reshape(-1)[0].decode(),
        log_probs=[] if log_probs is None else log_probs.reshape(-1).tolist(),
        top_log_probs=pairs(outputs, "top_log_prob_ids", "top_log_probs"),
        output_tokens=_scalar(outputs, "num_output_tokens"),
        cached_tokens=_scalar(outputs, "num_cached_tokens"),
        outputs=outputs,
        written_tokens=_scalar(outputs, "num_cache_write_tokens") if "num_cache_write_tokens" in outputs else None,
    )


def pairs(outputs: Mapping[str, np.ndarray], ids: str, log_probs: str) -> list[list[tuple[int, float]]]:
    """Return tokens with their log-probs, of two outputs ``[1, n, k]``; [] where they are absent."""
    if ids not in outputs or log_probs not in outputs:
        return []
    rows = zip(outputs[ids][0].tolist(), outputs[log_probs][0].tolist(), strict=True)
    return [list(zip(tokens, values, strict=True)) for tokens, values in rows]


async def _read(message: pb.ModelInferResponse) -> EngineDelta:
    return await off_loop(lambda: read_delta(decode(message)), sum(map(len, message.raw_output_contents)))


def _scalar(outputs: Mapping[str, np.ndarray], name: str) -> int:
    array = outputs.get(name)
    return 0 if array is None else int(array.reshape(-1)[0])
