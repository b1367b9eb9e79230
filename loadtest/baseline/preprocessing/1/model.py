"""The upstream ensemble's way to prepare a prompt, rebuilt for comparison: transformers' tokenizer, prompt by prompt.

The input and output tensors, and what is computed for each request, are those of the upstream `preprocessing` model.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer


class TritonPythonModel:
    """One request after the other, each with all of its outputs."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer."""
        self._tokenizer = AutoTokenizer.from_pretrained(os.environ["BASELINE_TOKENIZER"])
        self._end_id = self._tokenizer.eos_token_id or 0
        self._pad_id = self._tokenizer.pad_token_id or self._end_id

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a dynamic batch."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        query = self._input(request, "QUERY")
        output_len = self._input(request, "REQUEST_OUTPUT_LEN")
        rows = [np.array(self._tokenizer.encode(text.decode())).astype(int) for text in query.reshape(-1)]
        lengths = np.array([[len(row)] for row in rows], np.int32)
        ids = np.full((len(rows), lengths.max()), self._pad_id, np.int32)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
        outputs = {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": lengths,
            "DECODER_INPUT_ID": np.zeros((len(rows), 1), np.int32),
            "REQUEST_DECODER_INPUT_LEN": np.ones((len(rows), 1), np.int32),
            "BAD_WORDS_IDS": self._words(request, "BAD_WORDS_DICT", len(rows)),
            "STOP_WORDS_IDS": self._words(request, "STOP_WORDS_DICT", len(rows)),
            "REQUEST_OUTPUT_LEN": output_len,
            "EMBEDDING_BIAS": np.zeros((len(rows), 0), np.float32),
            "OUT_END_ID": np.full((len(rows), 1), self._end_id, np.int32),
            "OUT_PAD_ID": np.full((len(rows), 1), self._pad_id, np.int32),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

    def _words(self, request: Any, name: str, rows: int) -> np.ndarray:
        words = self._input(request, name)
        if words is None:
            return np.zeros((rows, 2, 0), np.int32)
        lists = [[self._tokenizer.encode(word.decode(), add_special_tokens=False) for word in row] for row in words]
        flat = [[token for word in row for token in word] for row in lists]
        width = max(map(len, flat))
        table = np.zeros((rows, 2, width), np.int32)
        table[:, 1] = -1
        for index, (ids, row) in enumerate(zip(flat, lists, strict=True)):
            table[index, 0, : len(ids)] = ids
            table[index, 1, : len(row)] = np.cumsum([len(word) for word in row])
        return table

    def _input(self, request: Any, name: str) -> np.ndarray | None:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return None if tensor is None else tensor.as_numpy()
