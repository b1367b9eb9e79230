"""The detokenizer stage: the arrays that the engine sends to those that the client gets.

It owns the text state of every running stream, by the stream key that the engine gave out. It knows arrays and text,
not Triton.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from inflight.contract import PER_REQUEST_OUTPUTS
from inflight.errors import InvalidRequest
from inflight.text.detokenizer import StreamText, TextDelta, whole_text
from inflight.text.tokenizer import Tokenizer

MAX_STREAMS = 65_536
"""Most states kept at once. A stream that fails midway leaves its state behind: no last response removes it."""
_HANDED_THROUGH = tuple(tensor.name for tensor in PER_REQUEST_OUTPUTS)

_State = TypeVar("_State")


class StreamStates(OrderedDict[int, _State]):
    """A state for each running stream, by its key; beyond ``MAX_STREAMS`` the oldest is dropped."""

    def keep(self, key: int, state: _State) -> None:
        """Keep the state of the stream that was heard of last."""
        self[key] = state
        while len(self) > MAX_STREAMS:
            self.popitem(last=False)


class Postprocessor:
    """Turns token ids into text, stream by stream."""

    def __init__(self, tokenizer: Tokenizer, max_length: int | None = None) -> None:
        """``max_length``: the most tokens of a sequence; None: it is not known."""
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._streams: StreamStates[StreamText] = StreamStates()

    def postprocess(self, arrays: Mapping[str, np.ndarray], request_id: str = "") -> dict[str, np.ndarray] | None:
        """Return the client's arrays for one response of the engine, or None if it has nothing for the client.

        Inflight's engines name the stream in each response: only ``UpstreamPostprocessor`` uses ``request_id``.

        Raises:
            InvalidRequest: it is not what an engine sends. Any client can call this stage.
        """
        require(arrays, "output_ids", "sequence_length", "stream_key")
        final = self.is_final(arrays)
        if not final and arrays["output_ids"].size == 0:  # a heartbeat
            return None
        rows = [self._row(arrays, row, final) for row in range(len(arrays["output_ids"]))]
        deltas = [beams[0] for beams in rows]
        return {
            "text_output": np.array([delta.text.encode() for beams in rows for delta in beams], np.object_),
            "text_start": np.array([[delta.start] for delta in deltas], np.int32),
            "text_end": np.array([[delta.end] for delta in deltas], np.int32),
        } | {name: arrays[name] for name in _HANDED_THROUGH if name in arrays}

    def is_final(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Return whether nothing comes after this response of the engine."""
        return "finish_reason" in arrays

    def cancel_requests(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Return the inputs of the requests that make the engine cancel the streams of this response."""
        keys: list[int] = arrays["stream_key"].reshape(-1).tolist()
        return [{"stop": np.ones((1, 1), np.bool_), "stream_key": np.array([[key]], np.int64)} for key in keys]

    def ends_engine(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Return whether the engine must be told to end the request; Inflight's engines end it by themselves."""
        return False

    def __len__(self) -> int:
        return len(self._streams)

    def _row(self, arrays: Mapping[str, np.ndarray], row: int, final: bool) -> list[TextDelta]:
        """Return a row's new text, one per beam; only a request with a single response has several beams."""
        key = int(arrays["stream_key"].reshape(-1)[row])
        beams = self.beams(arrays["output_ids"][row], arrays["sequence_length"][row].reshape(-1).tolist())
        stream = self._streams.pop(key, None) or self._new_stream(arrays, row)
        if not final:
            self._streams.keep(key, stream)
        streams = [stream, *(StreamText(self._tokenizer) for _ in beams[1:])]
        limit, echo = _scalar(arrays, "text_limit", row), _scalar(arrays, "echo_length", row) or 0
        deltas = [one.push(ids[echo:], limit, final) for one, ids in zip(streams, beams, strict=True)]
        if not echo:
            return deltas
        for index, (ids, delta) in enumerate(zip(beams, deltas, strict=True)):
            # Prompt and output are decoded as one text, cut where the output alone is cut: decoded apart, they would
            # lose the space between them in SentencePiece vocabularies.
            hidden = len(whole_text(self._tokenizer, ids[echo:])) - len(delta.text)
            whole = whole_text(self._tokenizer, ids)
            deltas[index] = delta._replace(text=whole[: len(whole) - hidden])
        return deltas

    def _new_stream(self, arrays: Mapping[str, np.ndarray], row: int) -> StreamText:
        """Return the text of a stream that begins, or goes on behind what an earlier run has generated."""
        stream = StreamText(self._tokenizer)
        if "resumed_output_ids" in arrays:
            ids = arrays["resumed_output_ids"][row].reshape(1, -1)
            (resumed,) = self.beams(ids, [ids.size], "resumed_output_ids")
            stream.push(resumed, _scalar(arrays, "resumed_text_limit", row), final=False)
        return stream

    def beams(self, output_ids: np.ndarray, lengths: list[int], name: str = "output_ids") -> list[list[int]]:
        """Return the ids of each beam of a row: ``output_ids`` [beams, n], of which ``lengths`` [beams] count.

        ``name``: the tensor that they come from.

        Raises:
            InvalidRequest: they do not fit together, or an id is no token's.
        """
        if len(lengths) != len(output_ids) or not all(0 <= length <= output_ids.shape[-1] for length in lengths):
            raise InvalidRequest(f"sequence_length is {lengths}; it must fit {name}, {list(output_ids.shape)}")
        if self._max_length is not None and output_ids.shape[-1] > self._max_length:
            raise InvalidRequest(f"{name} has rows of {output_ids.shape[-1]} ids; the limit is {self._max_length}")
        beams = [ids[:length].tolist() for ids, length in zip(output_ids, lengths, strict=True)]
        size = self._tokenizer.config.vocab_size
        for token in (edge for ids in beams if ids for edge in (min(ids), max(ids))):
            if not 0 <= token < size:
                raise InvalidRequest(f"{name} has token {token}; it must be between 0 and {size - 1}")
        return beams


def require(arrays: Mapping[str, np.ndarray], *names: str) -> None:
    """Raise InvalidRequest by name for one of these that is absent."""
    for name in names:
        if name not in arrays:
            raise InvalidRequest(f"{name} is missing; this stage takes what the engine's sends")


def _scalar(arrays: Mapping[str, np.ndarray], name: str, row: int) -> int | None:
    return int(arrays[name].reshape(-1)[row]) if name in arrays else None
