"""The tokenizer stage in front of upstream's C++ backend, which knows none of Inflight's own tensors.

It translates what upstream understands and refuses the other inputs by name.

The detokenizer stage must know how a request may end (max tokens, end ids, stop strings), and upstream's backend hands
nothing through. So this stage announces each request to it. Little in a response says which request it belongs to: the
request id, the row, the prompt where it is echoed, and which optional outputs it has. Two of these outputs therefore
serve as a *mark*: it tells a stream from a whole answer, and two requests that differ only in how they end.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from inflight.contract import ENSEMBLE_INPUTS, EXPECTATION, PERFORMANCE_OUTPUTS, TENSORRTLLM
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.inputs import Inputs, check_one_response, check_sequences, given_end_ids, read_sampling
from inflight.sampling import MAX_SEED, SamplingParams
from inflight.settings.deployment import LimitSettings
from inflight.text.preprocess import Arrays, Preprocessor, RawRequest, word_lists
from inflight.text.stops import MAX_STOP_SEQUENCES, StopTokens
from inflight.text.tokenizer import Tokenizer

_SAMPLING_INPUTS = {
    name: name
    for name in "temperature top_k top_p seed min_tokens repetition_penalty presence_penalty frequency_penalty".split()
}
"""The fields of ``SamplingParams`` that a request may give, with the inputs that give them."""
MARKS = {"return_num_output_tokens": 1, "return_perf_metrics": 2}
"""The engine inputs that ask for the outputs that serve as marks, with the value of each in the mark."""
STREAM_MARKS, MARKS_OF_WHOLE, MARKS_WITH_TIMES = (2,), (0, 1, 3), (3,)
"""The marks of streams, which need the times; of whole answers; of whole answers whose client asks for the times."""
_PERF_OUTPUTS = frozenset(tensor.name for tensor in PERFORMANCE_OUTPUTS)
_ASKED_BY = {
    "return_num_input_tokens": {"num_input_tokens"},
    "return_num_output_tokens": {"num_output_tokens"},
    "return_perf_metrics": _PERF_OUTPUTS,
    "final_perf_metrics": {"final_perf_metrics"},
}
"""The client's flags, with the outputs that each asks for. The stage itself asks for some of these outputs too."""
OWN_SAKE = _PERF_OUTPUTS | {"num_input_tokens", "num_output_tokens"}
"""The outputs that the stage may ask for itself, whether or not the client does."""

_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Expected:
    """How a row of a request may end, and what its client asked for."""

    max_tokens: _Count
    """Most tokens, the context's limit included."""
    min_tokens: _Count
    end_ids: tuple[int, ...]
    """None of them is shown. Upstream leaves out the first; the others go as stop words, and their tokens come back."""
    stops: tuple[Annotated[str, Field(min_length=1)], ...]
    prompt_tokens: _Count
    echo: bool
    """Whether the prompt comes before the answer."""
    sequences: Annotated[int, Field(ge=1)]
    """Return sequences of this row."""
    asked: tuple[str, ...]
    """The outputs of ``OWN_SAKE`` that the client asked for; ``final_perf_metrics``: those of the last response."""

    def outputs(self, final: bool) -> Iterable[str]:
        """Return what the client gets of these outputs, with its last response or with another."""
        return OWN_SAKE & {*self.asked, *(_PERF_OUTPUTS if final and "final_perf_metrics" in self.asked else ())}


@dataclass(frozen=True)
class Announcement:
    """One request, before the engine gets it."""

    request_id: str
    digests: tuple[str, ...]
    """What stands for each row's prompt."""
    rows: tuple[Expected, ...]
    marks: tuple[int, ...]
    """The marks that it can have, the best first."""


ANNOUNCEMENT = TypeAdapter(Announcement)
"""Writes an announcement as JSON, and reads it."""


def digest(prompt: Sequence[int]) -> str:
    """Return what stands for a prompt in an announcement; a stream does not return its own, so its length does."""
    return hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).hexdigest()


class UpstreamPreprocessor(Preprocessor):
    """The tokenizer stage: it refuses what upstream's backend does not know, and says the rest in its terms."""

    table = ENSEMBLE_INPUTS
    engine = TENSORRTLLM

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: LimitSettings,
        announce: Callable[[bytes], int | None],
        max_length: int,
        decoupled: bool = True,
        vouched: bool = False,
    ) -> None:
        """Take the deployment's tokenizer and limits, and what only this stage knows of the engine.

        ``announce`` gives the detokenizer an announcement as JSON, and returns its mark; None: it has none left.
        ``max_length`` tokens are what the engine was compiled for, without those that drafts take. ``decoupled``:
        whether it may answer a request more than once.
        """
        super().__init__(tokenizer, limits, max_length, vouched)
        self._announce, self._max_length, self._decoupled = announce, max_length, decoupled
        self._stop_tokens = StopTokens(tokenizer)

    def preprocess(self, request: RawRequest) -> Arrays:
        """Return the request's output arrays; the detokenizer knows then what the request expects.

        Raises:
            InvalidRequest: as ``Preprocessor`` says, or the request cannot be told from one that runs.
            UnsupportedFeature: as ``Preprocessor`` says.
            EngineFailure: the detokenizer could not be told of it.
        """
        outputs: dict[str, Any] = super().preprocess(request)
        told = replace(outputs.pop(EXPECTATION), request_id=request.request_id)
        mark = self._announce(ANNOUNCEMENT.dump_json(told))
        if mark is None:
            raise InvalidRequest(
                "a request that this one cannot be told from is running and is to end otherwise; "
                "give each an id of its own"
            )
        shape = outputs["input_lengths"].shape
        outputs |= {name: np.full(shape, bool(mark & bit)) for name, bit in MARKS.items()}
        outputs["return_num_input_tokens"] = np.ones(shape, np.bool_)
        return outputs

    def _read(self, request: RawRequest) -> Inputs:
        inputs = super()._read(request)
        sequences, streaming = inputs.common("num_return_sequences", 1), bool(inputs.common("stream", False))
        check_sequences(sequences, self._limits)
        if not self._decoupled:
            check_one_response(streaming, sequences, inputs.rows)
        return inputs

    def _outputs(self, inputs: Inputs, rows: list[list[int]]) -> Arrays:
        for row in rows:
            if len(row) >= self._max_length:
                raise InvalidRequest(
                    f"input_ids: the prompt length ({len(row)} tokens) exceeds the limit; "
                    f"prompt and answer have {self._max_length} tokens together"
                )
        sampling = self._sampling(inputs)
        outputs = super()._outputs(inputs, rows) | sampling
        streaming = bool(inputs.scalar("stream", 0, False))
        expected = tuple(self._expected(inputs, index, len(row)) for index, row in enumerate(rows))
        digests = tuple(str(len(row)) if streaming else digest(row) for row in rows)
        timed = any({"arrival_time_ns", "final_perf_metrics"} & set(row.asked) for row in expected)
        marks = STREAM_MARKS if streaming else MARKS_WITH_TIMES if timed else MARKS_OF_WHOLE
        outputs[EXPECTATION] = Announcement("", digests, expected, marks)  # type: ignore[assignment]
        return outputs

    def _ends(self, inputs: Inputs) -> Arrays:
        rows = range(inputs.rows)
        stops = [self._stop_words(inputs, row) for row in rows]
        outputs = {
            "end_id": np.array([[(*self._end_ids(inputs, row), -1)[0]] for row in rows], np.int32),
            "exclude_input_in_output": np.zeros((inputs.rows, 1), np.bool_),
        }
        return outputs | ({"stop_words_list": word_lists(stops)} if any(stops) else {})

    def _end_ids(self, inputs: Inputs, row: int) -> tuple[int, ...]:
        """Return the end ids; upstream takes one, and the others as stop words of one token."""
        if inputs.scalar("ignore_eos", row, False):
            return ()
        if (given := given_end_ids(inputs, row)) is not None:
            return given
        end_ids = tuple(sorted(self._tokenizer.config.end_ids))
        if len(end_ids) > 1 and inputs.scalar("min_tokens", row, 0) > 1:
            raise UnsupportedFeature(
                "min_tokens is not supported by this engine beside several end ids: it holds back one; "
                "name the one that ends the request with end_id"
            )
        return end_ids

    def _stop_words(self, inputs: Inputs, row: int) -> list[list[int]]:
        """Return the token sequences that end the generation in the engine, beside its end id.

        Stop strings are matched on text by the detokenizer; here they save the steps until it has seen the match. The
        engine does not hold stop words back for ``min_tokens``.
        """
        stops = [[token] for token in self._all_ends(inputs, row)[1:]]
        if inputs.scalar("min_tokens", row, 0) <= 1:
            words = inputs.strings("stop_words", row)
            share = max(1, (MAX_STOP_SEQUENCES - len(stops)) // max(1, len(words)))
            stops += [one for word in words for one in self._stop_tokens.sequences(word, share)]
        return [list(one) for one in dict.fromkeys(map(tuple, stops))]

    def _all_ends(self, inputs: Inputs, row: int) -> tuple[int, ...]:
        """Return the end ids, that of the engine first, and the special tokens that stop words name: as upstream."""
        named = [self._stop_tokens.special(word) for word in inputs.strings("stop_words", row)]
        ends = self._end_ids(inputs, row) or ((-1,) if any(one is not None for one in named) else ())
        return (*ends, *(one for one in named if one is not None and one not in ends))

    def _sampling(self, inputs: Inputs) -> Arrays:
        """Check what a request says of its sampling, and say it as upstream understands it.

        Upstream's defaults are others: without ``top_k`` it is greedy at any temperature, and without a seed every
        request has the same.
        """
        most = [inputs.scalar("max_tokens", row, self._limits.default_max_tokens) for row in range(inputs.rows)]
        rows = [
            SamplingParams(number, **read_sampling(inputs, row, _SAMPLING_INPUTS)) for row, number in enumerate(most)
        ]
        outputs = {
            "runtime_top_k": np.array([[1 if one.greedy else one.top_k] for one in rows], np.int32),
            "runtime_top_p": np.array([[1.0 if one.greedy else one.top_p] for one in rows], np.float32),
            "temperature": np.array([[1.0 if one.greedy else one.temperature] for one in rows], np.float32),
        }
        seeds = [secrets.randbelow(MAX_SEED + 1) if one.seed is None else one.seed for one in rows]
        return outputs | {"seed": np.array([[seed] for seed in seeds], np.uint64)}

    def _expected(self, inputs: Inputs, row: int, prompt_tokens: int) -> Expected:
        most = inputs.scalar("max_tokens", row, self._limits.default_max_tokens)
        echo = not (inputs.scalar("stream", row, False) or inputs.scalar("exclude_input_in_output", row, False))
        asked = [outputs for flag, outputs in _ASKED_BY.items() if inputs.scalar(flag, row, False)]
        return Expected(
            max_tokens=min(most, self._max_length - prompt_tokens),
            min_tokens=inputs.scalar("min_tokens", row, 0),
            end_ids=tuple(token for token in self._all_ends(inputs, row) if token >= 0),
            stops=tuple(inputs.strings("stop_words", row)),
            prompt_tokens=prompt_tokens,
            echo=echo,
            sequences=inputs.scalar("num_return_sequences", row, 1),
            asked=tuple(sorted(frozenset().union(*asked))),
        )
