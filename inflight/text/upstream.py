"""The two text stages before and after upstream's C++ backend, which has none of Inflight's own tensors.

What the stages tell each other elsewhere by tensors of our own goes here by upstream's:

- ``num_output_tokens``, asked for where the prompt comes back with the answer, says that ``output_ids`` begin with
  ``num_input_tokens`` tokens of the prompt;
- ``last_token_time_ns`` is zero until the last response of a sequence (TensorRT-LLM sets it when the request is
  finished; ``updatePerfMetrics`` in llmRequest.h);
- a stream is known by its request id, its row and its ``arrival_time_ns``, which keeps two of one id apart.

Both flags are therefore this stage's, and their outputs come unasked.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from inflight.contract import ENSEMBLE_INPUTS, TENSORRTLLM
from inflight.errors import InvalidRequest
from inflight.inputs import Inputs
from inflight.text.assemble import TextAssembler, require
from inflight.text.prepare import Arrays, PromptPreparer, RawRequest, word_lists
from inflight.text.trimmer import TextChunk


class UpstreamPreparer(PromptPreparer):
    """The tokenizer stage: it refuses what upstream's backend does not know, and says the rest in its terms."""

    table = ENSEMBLE_INPUTS
    engine = TENSORRTLLM

    def _read(self, request: RawRequest) -> Inputs:
        inputs = super()._read(request)
        sequences = inputs.scalar("num_return_sequences", 0, 1)
        if not 1 <= sequences <= self._limits.max_return_sequences:
            limit = self._limits.max_return_sequences
            raise InvalidRequest(f"num_return_sequences is {sequences}; it must be between 1 and {limit}")
        if inputs.scalar("stream", 0, False) and not request.request_id:
            raise InvalidRequest(
                "the request id is missing; with `engine.kind: tensorrtllm` a request that streams needs one of its own"
            )
        return inputs

    def _ends(self, inputs: Inputs) -> Arrays:
        rows = range(inputs.rows)
        echoes = [
            not (inputs.scalar("stream", row, False) or inputs.scalar("exclude_input_in_output", row, False))
            for row in rows
        ]
        asked = [bool(inputs.scalar("return_num_input_tokens", row, False)) for row in rows]
        ends = [self._end_ids(inputs, row) for row in rows]
        stops = [
            self._spellings("stop_words", inputs.strings("stop_words", row)) + [[token] for token in ends[row][1:]]
            for row in rows
        ]
        outputs = {
            "end_id": np.array([[end_ids[0]] for end_ids in ends], np.int32),
            "return_num_input_tokens": np.array([[a or b] for a, b in zip(asked, echoes, strict=True)]),
            "return_num_output_tokens": np.array([[echo] for echo in echoes]),
            "return_perf_metrics": np.ones((inputs.rows, 1), np.bool_),
        }
        return outputs | ({"stop_words_list": word_lists(stops)} if any(stops) else {})

    def _end_ids(self, inputs: Inputs, row: int) -> list[int]:
        """Return the end ids; upstream takes one, and the others as stop words of one token. -1: none."""
        if inputs.scalar("ignore_eos", row, False):
            return [-1]
        if "end_id" in inputs:
            return [inputs.scalar("end_id", row)]
        return sorted(self._tokenizer.config.end_ids) or [-1]


class UpstreamAssembler(TextAssembler):
    """The detokenizer stage. Why a request ended is unknown: upstream does not send it."""

    def assemble(self, arrays: Mapping[str, np.ndarray], request_id: str = "") -> dict[str, np.ndarray] | None:
        """Return the client's arrays for one response of upstream's engine."""
        require(
            arrays, "output_ids", "last_token_time_ns", *(["num_input_tokens"] if "num_output_tokens" in arrays else [])
        )
        echo = arrays["num_input_tokens"] if "num_output_tokens" in arrays else None
        added = {"stream_key": _stream_keys(arrays, request_id)} | ({} if echo is None else {"echo_length": echo})
        return super().assemble({**arrays, **added})

    def _handed_through(self, arrays: Mapping[str, np.ndarray], chunks: list[TextChunk]) -> dict[str, np.ndarray]:
        outputs = super()._handed_through(arrays, chunks)
        if self.is_final(arrays):
            outputs["finish_reason"] = np.full((len(chunks), 1), b"unknown", np.object_)
        # Upstream counts those of each response alone, the prompt's included.
        return outputs | {"num_output_tokens": np.array([[chunk.tokens] for chunk in chunks], np.int32)}

    def is_final(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Return whether the engine has finished the sequence."""
        return bool(arrays["last_token_time_ns"].all())

    def stops(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Return the engine inputs that end the request; upstream ends it by its id, and requires two of its inputs."""
        one = np.ones((1, 1), np.int32)
        return [{"stop": np.ones((1, 1), np.bool_), "input_lengths": one, "request_output_len": one}]


def _stream_keys(arrays: Mapping[str, np.ndarray], request_id: str) -> np.ndarray:
    """Return a key for each row of a response, int64 [rows, 1]."""
    rows = range(len(arrays["output_ids"]))
    names = ("arrival_time_ns", "batch_index", "sequence_index")
    columns = [arrays[name].reshape(-1).tolist() if name in arrays else [0 for _ in rows] for name in names]
    return np.array([[hash((request_id, *(column[row] for column in columns)))] for row in rows], np.int64)
