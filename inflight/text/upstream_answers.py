"""The detokenizer stage behind upstream's C++ backend: it finds the stop strings and why a request ends.

The backend says neither. It does say of each response:

- ``num_input_tokens``; an answer that does not stream has ``output_ids`` that begin with so many of the prompt;
- ``last_token_time_ns`` is zero until the last response of a sequence (TensorRT-LLM sets it when the request is
  finished; ``updatePerfMetrics`` in llmRequest.h). One that was stopped may end without it; but only the last response
  of a stream has no token;
- an end id is not among ``output_ids``; further end ids, which go as stop words, are;
- ``output_log_probs`` are those of all tokens so far, in a stream too; ``generation_logits`` are those of the new ones,
  in a stream [1, tokens, 1, vocabulary], in a whole answer [1, 1, max_tokens, vocabulary] (``setLogProbs`` in
  trtGptModelInflightBatching.cpp, ``createResponse`` and ``allocGenerationLogitsHost`` in llmRequest.h);
- a stream is known by its request id, its row and its ``arrival_time_ns``, which keeps two of one id apart.

The tokenizer's stage asks for these outputs; the client gets of them what it asked for.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from inflight.contract import EXPECTATION, MARK
from inflight.errors import InvalidRequest
from inflight.text.postprocess import Postprocessor, StreamStates, require
from inflight.text.stops import StopTextLimit
from inflight.text.tokenizer import Tokenizer
from inflight.text.upstream import ANNOUNCEMENT, MARKS, OWN_SAKE, STREAM_MARKS, Announcement, Expected, digest

_STALE_S = 120.0
"""A request that was silent for so long is taken for a failed one if another request needs its mark."""
_MOST, _MOST_CHARACTERS = 65_536, 64 << 20
"""The most entries, and the most characters of all of them."""

_Place = tuple[str, int, str, int]
"""Request id, row, digest of the prompt, mark."""


@dataclass(slots=True)
class _Entry:
    expected: Expected
    open: int
    """Sequences that have not ended."""
    request: int | None
    """The number of its request; None: several equal requests share it."""
    heard: float
    """When it was announced, or last heard of."""

    @property
    def stale(self) -> bool:
        return time.monotonic() - self.heard > _STALE_S


class Expectations:
    """The announced requests that have not ended; beyond ``_MOST``, the oldest are dropped."""

    def __init__(self) -> None:
        self._entries: OrderedDict[_Place, _Entry] = OrderedDict()
        """Ordered by when they were last heard of."""
        self._places: defaultdict[str, set[_Place]] = defaultdict(set)
        """The places of each request id."""
        self._announced = self._characters = 0

    def announce(self, announcement: Announcement) -> int | None:
        """Take a request; return its mark, or None if all marks are taken by requests that are to end otherwise."""
        request_id, digests = announcement.request_id, announcement.digests
        for over_stale in (False, True):
            for mark in announcement.marks:
                places = [(request_id, row, prompt, mark) for row, prompt in enumerate(digests)]
                rows = list(zip(places, announcement.rows, strict=True))
                if all(self._is_free(place, row, over_stale) for place, row in rows):
                    self._announced += 1
                    for place, row in rows:
                        self._take(place, row)
                    return mark
        return None

    def find(self, place: _Place) -> Expected | None:
        """Return what was announced of a response."""
        entry = self._entries.get(place)
        return None if entry is None else entry.expected

    def heard(self, place: _Place) -> None:
        """Note that one of its sequences goes on."""
        if (entry := self._entries.get(place)) is not None:
            entry.heard = time.monotonic()
            self._entries.move_to_end(place)

    def ended(self, place: _Place) -> None:
        """Note that one of its sequences has ended."""
        if (entry := self._entries.get(place)) is not None:
            entry.open -= 1
            if entry.open <= 0:
                self._remove(place)

    def alone(self, place: _Place, *, whole: bool = False) -> bool:
        """Return whether ``stop`` with the id of this request ends it only: no other that runs has the id.

        ``whole``: it may end all its sequences; else there must be one.
        """
        if not place[0] or place not in self._entries:
            return False
        running = [entry for other in self._places[place[0]] if not (entry := self._entries[other]).stale]
        if sum(one.open for one in running) == 1:
            return True
        requests = {one.request for one in running}
        return whole and len(requests) == 1 and None not in requests

    def __len__(self) -> int:
        return len(self._entries)

    def _is_free(self, place: _Place, row: Expected, over_stale: bool) -> bool:
        entry = self._entries.get(place)
        return entry is None or entry.expected == row or (over_stale and entry.stale)

    def _take(self, place: _Place, row: Expected) -> None:
        entry = self._entries.get(place)
        if entry is not None:
            self._remove(place)
        if entry is None or entry.expected != row:
            entry = _Entry(row, 0, self._announced, time.monotonic())
        else:
            entry.request, entry.heard = None, time.monotonic()
        entry.open += row.sequences
        self._entries[place] = entry
        self._places[place[0]].add(place)
        self._characters += _characters(place, row)
        while len(self._entries) > _MOST or (self._characters > _MOST_CHARACTERS and len(self._entries) > 1):
            self._remove(next(iter(self._entries)))

    def _remove(self, place: _Place) -> None:
        self._characters -= _characters(place, self._entries.pop(place).expected)
        self._places[place[0]].remove(place)
        if not self._places[place[0]]:
            del self._places[place[0]]


def _characters(place: _Place, row: Expected) -> int:
    """Return how much an entry holds, in characters: what has no limit of its own where any client can announce."""
    return len(place[0]) + len(place[2]) + sum(map(len, (*row.stops, *row.asked))) + 8 * len(row.end_ids)


class _Sequence:
    """One sequence on its way to the client, with the reason of its end, which is found from its tokens."""

    def __init__(self, tokenizer: Tokenizer, place: _Place, expected: Expected | None) -> None:
        self.place, self.expected = place, expected
        self.tokens = 0
        self.finish: str | None = None
        """Why it has ended for its client, who has been told then."""
        self.stopped = False
        """Whether the engine has been asked to end it."""
        stops = expected.stops if expected else ()
        self.limit = StopTextLimit(tokenizer, stops) if stops else None

    def take(self, ids: list[int]) -> list[int]:
        """Take new tokens; return those that the client gets, up to what ends the sequence."""
        expected = self.expected
        for count, token in enumerate(ids):
            if expected is not None and token in expected.end_ids:
                self.finish = "stop"
                return ids[:count]
            self.tokens += 1
            may_stop = expected is None or self.tokens >= expected.min_tokens
            if self.limit is not None and self.limit.push(token, may_stop):
                self.finish = "stop"
                return ids[: count + 1]
        return ids

    def end(self, stopped: bool) -> None:
        """Infer why the engine has ended it; an end id is not among the tokens, as upstream leaves it out."""
        expected = self.expected
        if expected is None:
            self.finish = "unknown"
        elif self.tokens >= expected.max_tokens:
            self.finish = "length"
        elif stopped or not expected.end_ids:
            self.finish = "cancelled"
        else:
            self.finish = "stop"

    def text_limit(self) -> int | None:
        """Return how many characters may be shown so far; None: all."""
        if self.limit is None:
            return None
        return self.limit.finish() if self.finish else self.limit.limit


class UpstreamPostprocessor:
    """Completes each response with what Inflight's engines say, and has a ``Postprocessor`` turn it into text."""

    def __init__(self, tokenizer: Tokenizer, max_length: int | None = None) -> None:
        """``max_length``: tokens that a sequence has at most; None: it is not known."""
        self._tokenizer = tokenizer
        self._text = Postprocessor(tokenizer, max_length)
        self._expectations = Expectations()
        self._sequences: StreamStates[_Sequence] = StreamStates()
        self._current: _Sequence | None = None
        """The sequence of the response at hand."""

    def postprocess(self, arrays: Mapping[str, np.ndarray], request_id: str = "") -> dict[str, np.ndarray] | None:
        """Return the client's arrays for one response of upstream's engine; None: the client has had its last one.

        What the tokenizer's stage announces is answered with its mark, -1 for none.
        """
        if EXPECTATION in arrays:
            try:
                announcement = ANNOUNCEMENT.validate_json(arrays[EXPECTATION].item())
            except ValueError:  # no announcement, or not one element
                announcement = None
            if announcement is None or len(announcement.digests) != len(announcement.rows):
                raise InvalidRequest("expectation is not what the tokenizer's stage sends")
            mark = self._expectations.announce(announcement)
            return {MARK: np.array([[-1 if mark is None else mark]], np.int32)}
        require(arrays, "output_ids", "sequence_length", "num_input_tokens")
        if arrays["output_ids"].shape[:2] != (1, 1) or arrays["output_ids"].ndim != 3:
            raise InvalidRequest(f"output_ids has shape {list(arrays['output_ids'].shape)}; it must be [1, 1, n]")
        [ids] = self._text.beams(arrays["output_ids"][0], arrays["sequence_length"].reshape(-1).tolist())
        key, sequence, echoed = self._sequence(arrays, ids, request_id)
        if sequence.finish is not None:  # the engine has not yet ended what has ended for the client
            self._keep(key, sequence, arrays)
            return None
        before = sequence.tokens
        new = sequence.take(ids[echoed:])
        if sequence.finish is None and self.is_final(arrays):
            sequence.end(stopped=_first(arrays, "last_token_time_ns", 1) == 0)
        self._keep(key, sequence, arrays)
        return self._answer({**arrays, **_per_token(arrays, before, len(new))}, key, sequence, ids[:echoed], new)

    def is_final(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Return whether the engine has finished the sequence."""
        if EXPECTATION in arrays or _mark(arrays) not in STREAM_MARKS:
            return True
        return bool(arrays["last_token_time_ns"].all()) or not arrays["output_ids"].size

    def cancel_requests(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Return the inputs of the request that makes the engine cancel this one; none if it would cancel another.

        Upstream ends the newest request of an id, and requires two of its inputs.
        """
        if self._current is None or not self._expectations.alone(self._current.place, whole=True):
            return []
        one = np.ones((1, 1), np.int32)
        return [{"stop": np.ones((1, 1), np.bool_), "input_lengths": one, "request_output_len": one}]

    def ends_engine(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Return whether the response at hand ended a sequence that the engine goes on with; once for each.

        A request that shares its id is not stopped, nor one of several sequences: the id would end the others too.
        """
        sequence = self._current
        if sequence is None or sequence.finish is None or sequence.stopped or self.is_final(arrays):
            return False
        sequence.stopped = True
        return self._expectations.alone(sequence.place)

    def _sequence(
        self, arrays: Mapping[str, np.ndarray], ids: list[int], request_id: str
    ) -> tuple[int, _Sequence, int]:
        """Return the key of the sequence that a response is of, its state, and how many of its ids are the prompt."""
        prompt_tokens, mark = _first(arrays, "num_input_tokens"), _mark(arrays)
        echoed = 0 if mark in STREAM_MARKS else prompt_tokens
        prompt = digest(ids[:echoed]) if echoed else str(prompt_tokens)
        place = (request_id, _first(arrays, "batch_index"), prompt, mark)
        key = hash((place, _first(arrays, "arrival_time_ns"), _first(arrays, "sequence_index")))
        sequence = self._sequences.pop(key, None)
        if sequence is None or echoed:
            sequence = _Sequence(self._tokenizer, place, self._expectations.find(place))
        self._current = sequence
        return key, sequence, echoed

    def _keep(self, key: int, sequence: _Sequence, arrays: Mapping[str, np.ndarray]) -> None:
        if self.is_final(arrays):
            self._expectations.ended(sequence.place)
            return
        self._expectations.heard(sequence.place)
        self._sequences.keep(key, sequence)

    def _answer(
        self, arrays: Mapping[str, np.ndarray], key: int, sequence: _Sequence, prompt: list[int], new: list[int]
    ) -> dict[str, np.ndarray] | None:
        expected = sequence.expected
        echo = prompt if expected is None or expected.echo else []
        shown = {name: array for name, array in arrays.items() if name not in OWN_SAKE}
        asked = OWN_SAKE if expected is None else expected.outputs(sequence.finish is not None)
        shown |= {name: arrays[name] for name in asked if name in arrays}
        if expected is not None and "num_input_tokens" in asked:
            shown["num_input_tokens"] = np.array([[expected.prompt_tokens]], np.int32)
        if "num_output_tokens" in asked:
            shown["num_output_tokens"] = np.array([[sequence.tokens]], np.int32)
        ids = echo + new
        own: dict[str, np.ndarray] = {
            "output_ids": np.array(ids, np.int32).reshape(1, 1, -1),
            "sequence_length": np.array([[len(ids)]], np.int32),
            "stream_key": np.array([[key]], np.int64),
        }
        numbers = {"echo_length": len(echo) or None, "text_limit": sequence.text_limit()}
        own |= {name: np.array([[number]], np.int32) for name, number in numbers.items() if number is not None}
        if sequence.finish is not None:
            own["finish_reason"] = np.array([[sequence.finish.encode()]], np.object_)
        return self._text.postprocess(shown | own)

    def __len__(self) -> int:
        return len(self._text) + len(self._sequences)


def _per_token(arrays: Mapping[str, np.ndarray], before: int, new: int) -> dict[str, np.ndarray]:
    """Return the log-probs and the logits of the ``new`` tokens that the client gets, after ``before`` others."""
    cut = {}
    if "output_log_probs" in arrays:
        cut["output_log_probs"] = arrays["output_log_probs"][:, :, before : before + new]
    if "generation_logits" in arrays:
        rows, one, other, width = arrays["generation_logits"].shape  # of the two, one is 1: the beams
        cut["generation_logits"] = arrays["generation_logits"].reshape(rows, 1, one * other, width)[:, :, :new]
    return cut


def _mark(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the mark of a response: which of the outputs it has that are asked for as marks."""
    bits = {"num_output_tokens": "return_num_output_tokens", "last_token_time_ns": "return_perf_metrics"}
    return sum(MARKS[flag] for name, flag in bits.items() if name in arrays)


def _first(arrays: Mapping[str, np.ndarray], name: str, default: int = 0) -> int:
    """Return the one number of an output that may be absent."""
    return int(arrays[name].reshape(-1)[0]) if name in arrays and arrays[name].size else default
