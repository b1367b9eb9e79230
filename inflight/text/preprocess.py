"""The tokenizer stage: makes the engine's input arrays of the client's. It knows arrays and text, not Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inflight.contract import ENSEMBLE_INPUTS, TOKENIZER_INPUTS, Tensor
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.inputs import Inputs, check_number, check_parameters, check_words
from inflight.settings.deployment import LimitSettings
from inflight.text.chat import chat_template_of, parse_json, parse_messages
from inflight.text.tokenizer import Tokenizer

Arrays = dict[str, np.ndarray]
_SOURCES = ("text_input", "messages")
"""The inputs that prompts come from."""
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
        texts = [self.arrays[name] for name in (*_SOURCES, "chat_template_kwargs") if name in self.arrays]
        return sum(len(text) for array in texts for text in array.reshape(-1))


class Preprocessor:
    """Turns text or chat messages into token ids and the engine's other inputs."""

    table: tuple[Tensor, ...] = TOKENIZER_INPUTS
    """The inputs that it validates."""
    engine = ""
    """The kind of engine that it validates them for; '': the engine's own stage does that."""

    def __init__(
        self, tokenizer: Tokenizer, limits: LimitSettings, longest: int | None = None, vouched: bool = False
    ) -> None:
        """
        Args:
            longest: most tokens of a prompt and its output together; None: only the engine knows.
            vouched: whether a part of the deployment says who asks.
        """
        self._tokenizer = tokenizer
        self._limits, self._longest, self._vouched = limits, longest, vouched
        config = tokenizer.config
        self._chat = chat_template_of(config)

    def preprocess(self, request: RawRequest) -> Arrays:
        """Return the request's output arrays.

        Raises:
            InvalidRequest: the request is not one that the contract allows, or its text cannot be encoded.
            UnsupportedFeature: it asks for what this checkpoint or engine does not have.
        """
        inputs = self._read(request)
        prompts = [self._prompt(inputs, row) for row in range(inputs.rows)]
        for text in prompts:
            self._check_length(_source(inputs), text)
        return self._outputs(inputs, self._encode(_source(inputs), prompts))

    def _read(self, request: RawRequest) -> Inputs:
        if request.error is not None:
            raise request.error
        check_parameters(request.parameters, _KNOWN, self._vouched)
        source = request.arrays.get("messages", request.arrays.get("text_input"))
        if source is None or not source.size:
            raise InvalidRequest("text_input is missing; a request needs text_input or messages")
        if "messages" in request.arrays and "text_input" in request.arrays:
            raise InvalidRequest("text_input and messages are both given; a request has one of them")
        inputs = Inputs(request.arrays, self.table, rows=len(source), engine=self.engine)
        check_words(inputs, _WORDS, self._limits)
        weights = inputs.vector("embedding_bias_weights", 0)
        check_number("embedding_bias_weights", weights.size, self._limits.max_words)
        return inputs

    def _prompt(self, inputs: Inputs, row: int) -> str:
        name = _source(inputs)
        text = self._bounded(inputs, name, row)
        if name == "text_input":
            if not text:
                raise InvalidRequest("text_input is empty; it must have at least one character")
            if "chat_template_kwargs" in inputs:
                raise InvalidRequest("chat_template_kwargs is given without messages")
            return text
        if self._chat is None:
            raise UnsupportedFeature("messages: this checkpoint has no chat template; send text_input")
        given = self._bounded(inputs, "chat_template_kwargs", row)
        options = parse_json("chat_template_kwargs", given) if given else {}
        if not isinstance(options, dict):
            raise InvalidRequest(f"chat_template_kwargs must be a JSON object, not {type(options).__name__}")
        return self._chat.render(parse_messages(text), options)

    def _bounded(self, inputs: Inputs, name: str, row: int) -> str:
        """Return a text of the request, empty where it is absent.

        One that is too long is refused before it is decoded: for hundreds of megabytes that takes seconds on a busy
        machine, in which no other thread of the stage runs.
        """
        value, limit = inputs.scalar(name, row, b""), self._limits.max_prompt_bytes
        size = len(value if isinstance(value, bytes) else value.encode())
        if size > limit:
            raise InvalidRequest(f"{name} has {size} bytes; the limit is {limit}")
        return inputs.string(name, row) or ""

    def _check_length(self, name: str, text: str) -> None:
        """Refuse a prompt that is far too long for the model: it would take seconds to encode it to its end."""
        if self._longest is not None and (found := self._tokenizer.excess(text, self._longest)) is not None:
            raise InvalidRequest(
                f"{name}: the prompt length (more than {found} tokens) exceeds the limit; "
                f"prompt and output may have {self._longest} tokens together"
            )

    def _encode(self, name: str, texts: list[str]) -> list[list[int]]:
        """Encode texts of the input ``name``; only a prompt that is not a chat gets the special tokens around it."""
        return _encode(name, texts, self._tokenizer, special=name == "text_input")

    def _outputs(self, inputs: Inputs, rows: list[list[int]]) -> Arrays:
        most = [inputs.scalar("max_tokens", row, self._limits.default_max_tokens) for row in range(inputs.rows)]
        for value in most:
            if value < 1:
                raise InvalidRequest(f"max_tokens is {value}; it must be at least 1")
        input_ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for index, row in enumerate(rows):
            input_ids[index, : len(row)] = row
        outputs = {
            "input_ids": input_ids,
            "input_lengths": np.array([[len(row)] for row in rows], np.int32),
            "request_output_len": np.array([[value] for value in most], np.int32),
        }
        outputs |= self._ends(inputs)
        pad_ids = [[inputs.scalar("pad_id", row, self._tokenizer.config.pad_id)] for row in range(inputs.rows)]
        if pad_ids[0][0] is not None:
            outputs["pad_id"] = np.array(pad_ids, np.int32)
        if "bad_words" in inputs:
            outputs["bad_words_list"] = word_lists([self._bad_words(inputs, row) for row in range(inputs.rows)])
        if "embedding_bias_words" in inputs or "embedding_bias_weights" in inputs:
            outputs["embedding_bias"] = np.stack([self._bias(inputs, row) for row in range(inputs.rows)])
        return outputs

    def _ends(self, inputs: Inputs) -> Arrays:
        """Return the inputs that end the generation, and ``heartbeat``, which asks for empty responses meanwhile."""
        end_ids, rows = sorted(self._tokenizer.config.end_ids), inputs.rows
        outputs: Arrays = {"heartbeat": np.ones((rows, 1), np.bool_)}
        if "end_id" in inputs:
            outputs["end_id"] = np.array([[inputs.scalar("end_id", row)] for row in range(rows)], np.int32)
        elif end_ids:
            outputs["end_ids"] = np.tile(np.array(end_ids, np.int32), (rows, 1))
        if "stop_words" in inputs:
            words = [inputs.strings("stop_words", row) for row in range(rows)]
            width = max(map(len, words))
            padded = [[text.encode() for text in row] + [b""] * (width - len(row)) for row in words]
            outputs["stop_strings"] = np.array(padded, np.object_)
        return outputs

    def _bad_words(self, inputs: Inputs, row: int) -> list[list[int]]:
        """Return the tokens of each word, alone and after a space: most vocabularies spell them differently."""
        return word_spellings("bad_words", inputs.strings("bad_words", row), self._tokenizer)

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
        sequences = self._encode("embedding_bias_words", texts)
        for text, tokens, weight in zip(texts, sequences, weights, strict=True):
            if not np.isfinite(weight):
                raise InvalidRequest(f"embedding_bias_weights has {weight}; it must be a finite number")
            if not tokens or max(tokens) >= len(bias):
                raise InvalidRequest(f"embedding_bias_words has {text!r}, for which the model has no token")
            bias[tokens] += weight
        return bias


def _encode(name: str, texts: list[str], tokenizer: Tokenizer, special: bool = False) -> list[list[int]]:
    try:
        return tokenizer.encode_batch(texts, add_special_tokens=special) if texts else []
    except Exception as error:  # the library raises bare Exception
        raise InvalidRequest(f"{name} cannot be encoded by this checkpoint's tokenizer: {error}") from None


def word_spellings(name: str, words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of each word, alone and after a space: most vocabularies spell them differently.

    Raises:
        InvalidRequest: naming the input, and a word for which there is no token.
    """
    sequences = _encode(name, [spelling for word in words for spelling in (word, f" {word}")], tokenizer)
    for word, tokens in zip(words, sequences[::2], strict=True):
        if not tokens:
            raise InvalidRequest(f"{name} has {word!r}, for which the model has no token")
    return [list(tokens) for tokens in dict.fromkeys(map(tuple, sequences))]


def word_lists(rows: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """Lay out word lists as upstream does: int32 [batch, 2, n], row 0 all ids joined, row 1 end offsets, -1 padded."""
    width = max((sum(map(len, row)) for row in rows), default=0)
    table = np.zeros((len(rows), 2, width), np.int32)
    table[:, 1] = -1
    for index, row in enumerate(rows):
        ids = [token for word in row for token in word]
        table[index, 0, : len(ids)] = ids
        table[index, 1, : len(row)] = np.cumsum([len(word) for word in row])
    return table


def _source(inputs: Inputs) -> str:
    """Return the input that the prompts of a request come from."""
    return "messages" if "messages" in inputs else "text_input"
