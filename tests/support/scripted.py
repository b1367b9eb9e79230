"""A scripted sequence that keeps the contract of resumed streams as strictly as an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_NOT_RESUMED = ("num_return_sequences", "beam_width", "pooling", "num_prompt_log_probs")


class ServerError(Exception):
    """An error answer: the first word of the text is its status."""


class Script:
    """The responses of one sequence: a token for each piece of text, chosen by seed and place."""

    def __init__(self, pieces: tuple[str, ...], inputs: dict[str, Any], seed: int) -> None:
        """Raises ServerError: the sequence cannot be resumed so."""
        self._pieces, self._inputs, self._seed = pieces, inputs, seed
        self._ids = [(seed + 31 * number) % 50_000 for number in range(len(pieces))]
        # Numbers that FP32 has exactly, each another one: none can be lost or come twice unseen.
        self._log_probs = [-0.5 - number / 64 for number in range(len(pieces))]
        self._check()

    def _check(self) -> None:
        resumed = self._inputs.get("resumed_ids", [])
        log_probs = self._inputs.get("resumed_log_probs", [])
        wanted = self._log_probs[: len(resumed)] if self._inputs.get("return_log_probs") else []
        if resumed != self._ids[: len(resumed)] or len(resumed) >= len(self._ids):
            raise ServerError(f"INVALID_ARGUMENT: resumed_ids is {resumed}; the tokens are {self._ids}")
        if log_probs != wanted:
            raise ServerError(f"INVALID_ARGUMENT: resumed_log_probs is {log_probs}; it must be {wanted}")
        if refused := [name for name in _NOT_RESUMED if resumed and self._inputs.get(name, 1) != 1]:
            raise ServerError(f"UNIMPLEMENTED: {refused[0]} is not supported with resumed_ids")

    def responses(self) -> Iterator[dict[str, list[Any]]]:
        """Yield the response of each piece that has not been resumed, or one of all if it does not stream."""
        first = len(self._inputs.get("resumed_ids", []))
        start = sum(map(len, self._pieces[:first]))
        opening = {"used_seed": [self._seed]} if "temperature" in self._inputs or "seed" in self._inputs else {}
        ends = range(first + 1, len(self._pieces) + 1) if self._inputs["stream"] else [len(self._pieces)]
        for end in ends:
            text = "".join(self._pieces[first:end])
            response: dict[str, list[Any]] = {
                "text_output": [text],
                "text_start": [start],
                "text_end": [start + len(text)],
            }
            if self._inputs.get("return_token_ids"):
                response |= {"token_ids": self._ids[first:end]} | opening
            yield response | self._scores(first, end) | ({"finish_reason": ["stop"]} if end == ends[-1] else {})
            first, start, opening = end, start + len(text), {}

    def _scores(self, first: int, end: int) -> dict[str, list[Any]]:
        inputs, scores = self._inputs, dict[str, list[Any]]()
        if inputs.get("return_log_probs"):
            scores = {"cum_log_probs": [sum(self._log_probs[:end])], "output_log_probs": self._log_probs[first:end]}
        if width := inputs.get("num_top_log_probs"):
            scores["top_log_prob_ids"] = [id_ + rank for id_ in self._ids[first:end] for rank in range(width)]
            scores["top_log_probs"] = [-0.5 * (rank + 1) for _ in range(first, end) for rank in range(width)]
        if "num_prompt_log_probs" in inputs and not first:
            scores["prompt_log_probs"] = [-1.0, -2.0]
        if inputs.get("return_num_input_tokens"):
            scores["num_input_tokens"] = [7]
        if inputs.get("return_num_output_tokens"):
            scores["num_output_tokens"] = [end]
        return scores
