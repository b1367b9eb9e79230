"""The tokenizer stage: its input arrays to its output arrays, for a whole dynamic batch at once.

Each request succeeds or fails alone. This module knows arrays and text, not Triton.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inflight.contract import ENSEMBLE_INPUTS, TOKENIZER_INPUTS, Tensor
from inflight.deployment import LimitSettings
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.inputs import Inputs, check_parameters
from inflight.limits import check_count, check_words
from inflight.text.chat import ChatTemplate, parse_messages
from inflight.text.tokenizer import Tokenizer

Arrays = dict[str, np.ndarray]
_TEXTS = ("text_input", "messages", "chat_template_kwargs")
_WORDS = ("stop_words", "bad_words", "embedding_bias_words")
_KNOWN = [tensor.name for tensor in ENSEMBLE_INPUTS]


@dataclass(frozen=True)
class RawRequest:
    """One request as it came: arrays by contract name, Triton's request parameters, and its id if it has one."""

    arrays: Mapping[str, np.ndarray]
    parameters: Mapping[str, object]
    request_id: str = ""
    error: Exception | None = None
    """Why it could not be read."""

    @property
    def text_bytes(self) -> int:
        """Bytes of the prompts, or of the chats and what goes with them."""
        texts = [self.arrays[name] for name in _TEXTS if name in self.arrays]
        return sum(len(text) for array in texts for text in array.reshape(-1))


@dataclass(frozen=True)
class _Prompt:
    name: str
    """The input that it comes from."""
    text: str
    add_special_tokens: bool


class PromptPreparer:
    """Turns text or chat messages into everything that the engine needs to know of them."""

    table: tuple[Tensor, ...] = TOKENIZER_INPUTS
    """The inputs that it judges."""
    engine = ""
    """The engine that it judges them for, where the engine's own stage does not."""

    def __init__(self, tokenizer: Tokenizer, limits: LimitSettings) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        config = tokenizer.config
        self._chat = ChatTemplate(config.chat_template, config.special_tokens) if config.chat_template else None

    def prepare(self, requests: Sequence[RawRequest]) -> list[Arrays | Exception]:
        """Return for each request its output arrays, or the error that it ends with.

        Whatever goes wrong with one request, a fault of ours included, is that request's alone.
        """
        results: list[Arrays | Exception] = [{} for _ in requests]
        read: list[tuple[int, Inputs, list[_Prompt]]] = []
        for index, request in enumerate(requests):
            try:
                inputs = self._read(request)
                read.append((index, inputs, [self._prompt(inputs, row) for row in range(inputs.rows)]))
            except Exception as error:
                results[index] = error
        token_ids = self._encode_all([prompts for _, _, prompts in read])
        for (index, inputs, _), rows in zip(read, token_ids, strict=True):
            try:
                results[index] = rows if isinstance(rows, Exception) else self._outputs(inputs, rows)
            except Exception as error:
                results[index] = error
        return results

    def _read(self, request: RawRequest) -> Inputs:
        if request.error is not None:
            raise request.error
        check_parameters(request.parameters, _KNOWN)
        source = request.arrays.get("messages", request.arrays.get("text_input"))
        if source is None or not source.size:
            raise InvalidRequest("text_input is missing; a request needs text_input or messages")
        if "messages" in request.arrays and "text_input" in request.arrays:
            raise InvalidRequest("text_input and messages are both given; a request has one of them")
        inputs = Inputs(request.arrays, self.table, rows=len(source), engine=self.engine)
        check_words(inputs, _WORDS, self._limits)
        check_count(inputs, "embedding_bias_weights", self._limits.max_words)
        return inputs

    def _prompt(self, inputs: Inputs, row: int) -> _Prompt:
        name = "messages" if "messages" in inputs else "text_input"
        text = inputs.string(name, row) or ""
        self._check_size(name, text)
        if name == "text_input":
            if not text:
                raise InvalidRequest("text_input is empty; it must have at least one character")
            if "chat_template_kwargs" in inputs:
                raise InvalidRequest("chat_template_kwargs is given without messages")
            return _Prompt(name, text, add_special_tokens=True)
        if self._chat is None:
            raise UnsupportedFeature("messages: this checkpoint has no chat template; send text_input")
        given = inputs.string("chat_template_kwargs", row) or ""
        self._check_size("chat_template_kwargs", given)
        options = _json_object("chat_template_kwargs", given)
        return _Prompt(name, self._chat.render(parse_messages(text), options), add_special_tokens=False)

    def _check_size(self, name: str, text: str) -> None:
        size, limit = len(text.encode()), self._limits.max_prompt_bytes
        if size > limit:
            raise InvalidRequest(f"{name} has {size} bytes; the limit is {limit}")

    def _encode_all(self, requests: list[list[_Prompt]]) -> list[list[list[int]] | Exception]:
        """Encode the prompts of all requests together; where one cannot be encoded, its request fails alone."""
        try:
            token_ids = iter(self._encode([prompt for prompts in requests for prompt in prompts]))
            return [[next(token_ids) for _ in prompts] for prompts in requests]
        except Exception:  # of the whole batch, and it does not say whose it is
            return [self._encode_alone(prompts) for prompts in requests]

    def _encode_alone(self, prompts: list[_Prompt]) -> list[list[int]] | Exception:
        try:
            return self._encode(prompts)
        except Exception as error:  # the library raises bare Exception
            return InvalidRequest(f"{prompts[0].name} cannot be encoded by this checkpoint's tokenizer: {error}")

    def _encode(self, prompts: list[_Prompt]) -> list[list[int]]:
        """Encode all prompts with at most two calls of the batched encoder."""
        encoded: list[list[int]] = [[] for _ in prompts]
        for special in (True, False):
            indices = [index for index, prompt in enumerate(prompts) if prompt.add_special_tokens is special]
            ids = self._tokenizer.encode_batch([prompts[index].text for index in indices], special) if indices else []
            for index, tokens in zip(indices, ids, strict=True):
                encoded[index] = tokens
        return encoded

    def _outputs(self, inputs: Inputs, rows: list[list[int]]) -> Arrays:
        outputs = {
            "input_ids": _padded(rows, fill=0),
            "input_lengths": np.array([[len(row)] for row in rows], np.int32),
            "request_output_len": self._max_tokens(inputs),
        }
        outputs |= self._ends(inputs)
        pad_ids = [[inputs.scalar("pad_id", row, self._tokenizer.config.pad_id)] for row in range(inputs.rows)]
        if pad_ids[0][0] is not None:
            outputs["pad_id"] = np.array(pad_ids, np.int32)
        if "bad_words" in inputs:
            words = [inputs.strings("bad_words", row) for row in range(inputs.rows)]
            outputs["bad_words_list"] = word_lists([self._spellings("bad_words", row) for row in words])
        if "embedding_bias_words" in inputs or "embedding_bias_weights" in inputs:
            outputs["embedding_bias"] = np.stack([self._bias(inputs, row) for row in range(inputs.rows)])
        return outputs

    def _max_tokens(self, inputs: Inputs) -> np.ndarray:
        values = [inputs.scalar("max_tokens", row, self._limits.default_max_tokens) for row in range(inputs.rows)]
        for value in values:
            if value < 1:
                raise InvalidRequest(f"max_tokens is {value}; it must be at least 1")
        return np.array(values, np.int32).reshape(-1, 1)

    def _ends(self, inputs: Inputs) -> Arrays:
        """Return what ends the generation, and the sign that empty responses are welcome meanwhile."""
        end_ids, rows = sorted(self._tokenizer.config.end_ids), inputs.rows
        outputs: Arrays = {"heartbeat": np.ones((rows, 1), np.bool_)}
        if "end_id" in inputs:
            outputs["end_id"] = np.array([[inputs.scalar("end_id", row)] for row in range(rows)], np.int32)
        elif end_ids:
            outputs["end_ids"] = np.tile(np.array(end_ids, np.int32), (rows, 1))
        if "stop_words" in inputs:
            outputs["stop_strings"] = _padded_strings([inputs.strings("stop_words", row) for row in range(rows)])
        return outputs

    def _spellings(self, name: str, words: list[str]) -> list[list[int]]:
        """Return the tokens of each word, alone and after a space: most vocabularies spell them differently."""
        spellings = [spelling for word in words for spelling in (word, f" {word}")]
        sequences = self._word_tokens(name, spellings)
        for word, tokens in zip(words, sequences[::2], strict=True):
            if not tokens:
                raise InvalidRequest(f"{name} has {word!r}, for which the model has no token")
        return [list(tokens) for tokens in dict.fromkeys(map(tuple, sequences))]

    def _word_tokens(self, name: str, words: list[str]) -> list[list[int]]:
        try:
            return self._tokenizer.encode_words(words)
        except Exception as error:  # the library raises bare Exception
            raise InvalidRequest(f"{name} cannot be encoded by this checkpoint's tokenizer: {error}") from None

    def _bias(self, inputs: Inputs, row: int) -> np.ndarray:
        words, weights = inputs.vector("embedding_bias_words", row), inputs.vector("embedding_bias_weights", row)
        if len(words) != len(weights):
            raise InvalidRequest(
                f"embedding_bias_words has {len(words)} words and embedding_bias_weights {len(weights)} weights; "
                "they must be as many"
            )
        bias = np.zeros(self._tokenizer.config.vocab_size, np.float32)
        texts = inputs.strings("embedding_bias_words", row)
        if len(texts) != len(words):
            raise InvalidRequest("embedding_bias_words has an empty word")
        sequences = self._word_tokens("embedding_bias_words", texts)
        for text, tokens, weight in zip(texts, sequences, weights, strict=True):
            if not np.isfinite(weight):
                raise InvalidRequest(f"embedding_bias_weights has {weight}; it must be a finite number")
            if not tokens or max(tokens) >= len(bias):
                raise InvalidRequest(f"embedding_bias_words has {text!r}, for which the model has no token")
            bias[tokens] += weight
        return bias


def word_lists(rows: list[list[list[int]]]) -> np.ndarray:
    """Lay word lists out as upstream does: int32 [batch, 2, n], row 0 all ids joined, row 1 end offsets, -1 padded."""
    width = max((sum(map(len, row)) for row in rows), default=0)
    table = np.zeros((len(rows), 2, width), np.int32)
    table[:, 1] = -1
    for index, row in enumerate(rows):
        ids = [token for word in row for token in word]
        table[index, 0, : len(ids)] = ids
        table[index, 1, : len(row)] = np.cumsum([len(word) for word in row])
    return table


def _padded(rows: list[list[int]], fill: int) -> np.ndarray:
    table = np.full((len(rows), max(map(len, rows))), fill, np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def _padded_strings(rows: list[list[str]]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([[text.encode() for text in row] + [b""] * (width - len(row)) for row in rows], np.object_)


def _json_object(name: str, text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON object, not {type(value).__name__}")
    return value
