"""Reads the arrays of one request by their contract names, and refuses by name what the contract does not serve.

It knows names, shapes, and what is the same before every stage: how many words and token ids a request may have, and
what its sampling means. It does not know Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from inflight.contract import CLIENT, ENGINE_NAME_OF, Tensor
from inflight.errors import InvalidRequest, UnsupportedFeature, nearest
from inflight.settings.api_keys import client_of
from inflight.settings.deployment import LimitSettings

TRITON_PARAMETERS = frozenset(
    "id Streaming priority timeout sequence_id sequence_start sequence_end binary_data_output binary_data_size "
    "classification shared_memory_region shared_memory_offset shared_memory_byte_size".split()
)
"""Request parameters that Triton or its clients add themselves."""
HEADER_PARAMETERS = frozenset({"traceparent", "tracestate"})
"""The W3C trace context, as parameters or as headers that Triton hands on; a client need not know if it is used."""
MOST_CLIENT_ID = 256
"""The most characters of a client's name."""
FOREIGN_NAMES = {
    "text_input input_ids": "prompt input inputs text query",
    "messages input_ids": "conversation system system_prompt",
    "chat_template_kwargs": "tools documents enable_thinking add_generation_prompt",
    "max_tokens request_output_len": "max_new_tokens max_completion_tokens max_output_tokens max_length n_predict",
    "min_tokens": "min_new_tokens min_length",
    "stop_words stop_strings": "stop stop_sequences stop_strings",
    "bad_words bad_words_list": "bad_words_ids",
    "end_id": "eos_token_id stop_token_ids end_token",
    "pad_id": "pad_token_id",
    "embedding_bias_words embedding_bias": "logit_bias",
    "num_return_sequences": "n best_of",
    "beam_width": "num_beams use_beam_search",
    "temperature": "do_sample",
    "return_log_probs": "logprobs log_probs",
    "num_top_log_probs": "top_logprobs top_n_tokens",
    "num_prompt_log_probs": "prompt_logprobs",
    "log_prob_token_ids": "logprob_token_ids label_token_ids token_ids_logprob",
    "pooling": "pooling_type pooling_mode embed embeddings",
    "exclude_input_in_output": "echo return_full_text",
    "seed": "random_seed",
    "client_id": "user client tenant",
    "lora_name": "lora adapter adapter_id",
    "guided_decoding_guide_type": "response_format guided_json guided_regex guided_grammar grammar structured_outputs",
    "stream streaming": "streaming stream",
    "top_k runtime_top_k": "top_k topk runtime_top_k",
    "top_p runtime_top_p": "top_p topp runtime_top_p",
    "length_penalty len_penalty": "length_penalty len_penalty",
}
"""What OpenAI, vLLM, TGI and transformers call inputs, and what one stage's are called at the other; by their names at
the ensemble and at the engine's stage."""
_MEANT = {theirs: ours.split() for ours, names in FOREIGN_NAMES.items() for theirs in [*names.split(), *ours.split()]}
_ENSEMBLE_NAME_OF = {engine: ensemble for ensemble, engine in ENGINE_NAME_OF.items()}


class Inputs:
    """The inputs of one request: ``rows`` rows, each read by ``scalar``, ``vector`` or ``strings``."""

    def __init__(self, arrays: Mapping[str, np.ndarray], table: Iterable[Tensor], rows: int, engine: str = "") -> None:
        """Take the arrays of ``table``'s inputs by name; empty ones count as absent.

        Raises:
            UnsupportedFeature: a tensor that ``engine``, which is to serve them, does not serve asks for something.
        """
        self.rows = rows
        self._arrays = {name: array for name, array in arrays.items() if array.size}
        for tensor in table:
            if not tensor.served(engine) and tensor.name in self._arrays:
                _refuse_unless_neutral(tensor, self._arrays[tensor.name])

    def __contains__(self, name: str) -> bool:
        """Whether the request has this input, not empty."""
        return name in self._arrays

    def scalar(self, name: str, row: int, default: Any = None) -> Any:
        """Return the one element of ``name`` in ``row`` as a Python value, or ``default`` when absent.

        Raises:
            InvalidRequest: it has not one element per row.
        """
        array = self._arrays.get(name)
        if array is None:
            return default
        if array.size != self.rows:
            raise InvalidRequest(
                f"{name} has shape {list(array.shape)}; it must have one element for each row of the batch"
            )
        return array.reshape(-1)[row].item() if array.dtype != np.object_ else array.reshape(-1)[row]

    def common(self, name: str, default: Any = None) -> Any:
        """Return the value of ``name`` that all rows share, or ``default``. Raises InvalidRequest where they differ."""
        values = {self.scalar(name, row, default) for row in range(self.rows)}
        if len(values) > 1:
            raise InvalidRequest(f"{name} differs between the rows of the batch; one request has one")
        return values.pop()

    def vector(self, name: str, row: int) -> np.ndarray:
        """Return ``name``'s ``row``, shape [n] or [2, n] as declared, or an empty array when absent."""
        array = self._arrays.get(name)
        if array is None:
            return np.empty(0, np.int32)
        if array.shape[0] != self.rows:
            raise InvalidRequest(
                f"{name} has shape {list(array.shape)}; its first dimension must be {self.rows}, the batch size"
            )
        return array[row]

    def string(self, name: str, row: int) -> str | None:
        """Return the one string of ``name`` in ``row``, or None when absent. Raises InvalidRequest on broken UTF-8."""
        value = self.scalar(name, row)
        return None if value is None else _decode(name, value)

    def strings(self, name: str, row: int) -> list[str]:
        """Return the non-empty strings of ``name`` in ``row``; upstream's clients send empty ones for none."""
        return [text for text in (_decode(name, value) for value in self.vector(name, row).reshape(-1)) if text]


def read_sampling(inputs: Inputs, row: int, input_of: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that a request gives; ``input_of`` names the inputs that do, by field.

    Upstream samples only when a request says so, and its clients always send temperature 1.0, for greedy too: 1.0
    alone is greedy; with top_k, top_p, min_p or a seed beside it, or any other value, it samples.
    """
    values = {field: inputs.scalar(name, row) for field, name in input_of.items()}
    given = {field: value for field, value in values.items() if value is not None}
    if given.get("top_p", 1.0) <= 0:  # upstream ignores it, and its clients send 0.0 by default
        del given["top_p"]
    if given.get("temperature", 1.0) == 1.0:
        samples = not given.keys().isdisjoint(("top_k", "top_p", "min_p", "seed"))
        given["temperature"] = 1.0 if samples else None
    return given


def given_end_ids(inputs: Inputs, row: int) -> tuple[int, ...] | None:
    """Return the end ids that ``end_id`` says, which are none for -1; None: it is absent."""
    end_id = inputs.scalar("end_id", row)
    if end_id is not None and end_id < -1:
        raise InvalidRequest(f"end_id is {end_id}; it must be a token id, or -1 for none")
    return None if end_id is None else () if end_id == -1 else (end_id,)


def client_named(parameters: Mapping[str, object], vouched: bool) -> str:
    """Return who asks, as the door or the gateway says: a long name's hash, "" where neither does (``vouched``)."""
    name = str(parameters.get(CLIENT, "")) if vouched else ""
    return name if len(name) <= MOST_CLIENT_ID else client_of(name)


def check_parameters(parameters: Mapping[str, object], known_inputs: Iterable[str], vouched: bool = False) -> None:
    """Refuse an unknown request parameter by name.

    On the generate endpoint a misspelt JSON key silently becomes a request parameter. The client's name may come only
    where the deployment has a part that says who asks (``vouched``).

    Raises:
        InvalidRequest: names the parameter and the known input that is meant, by what others call it or its spelling.
    """
    for name in parameters:
        if name.lower() == CLIENT:
            if not vouched:
                raise InvalidRequest(f"{name} is not supported by this deployment; it needs `door.enabled`")
            continue
        known = name in TRITON_PARAMETERS or name.lower() in HEADER_PARAMETERS
        if not known and not name.startswith("triton_"):
            inputs = list(known_inputs)
            meant = [one for one in _MEANT.get(name.lower(), ()) if one in inputs]
            hint = f" (did you mean {meant[0]!r}?)" if meant else nearest(name, inputs)
            raise InvalidRequest(f"unknown parameter {name!r}{hint}")


def check_words(inputs: Inputs, names: Iterable[str], limits: LimitSettings) -> None:
    """Check how many words these BYTES inputs have, one in each element, and how many bytes they have together.

    Raises:
        InvalidRequest: naming the input, what it has and the limit.
    """
    for name in names:
        for row in range(inputs.rows):
            words = inputs.vector(name, row).reshape(-1)
            check_number(name, words.size, limits.max_words, "words")
            check_number(name, sum(map(len, words)), limits.max_words_bytes, "bytes of words")


def check_number(name: str, number: int, limit: int, unit: str = "elements") -> None:
    """Check how many elements an input has in each row, or how many of another ``unit``.

    Raises:
        InvalidRequest: naming the input, what it has and the limit.
    """
    if number > limit:
        raise InvalidRequest(f"{name} has {number} {unit}; the limit is {limit}")


def check_sequences(sequences: int, limits: LimitSettings) -> None:
    """Raise InvalidRequest for a ``num_return_sequences`` that is not allowed."""
    if not 1 <= sequences <= limits.max_return_sequences:
        limit = limits.max_return_sequences
        raise InvalidRequest(f"num_return_sequences is {sequences}; it must be between 1 and {limit}")


def check_one_response(streaming: bool, sequences: int, rows: int = 1) -> None:
    """Raise InvalidRequest for what a deployment that is not decoupled cannot answer with one response."""
    name = "streaming" if streaming else "num_return_sequences above 1" if sequences > 1 else "a batch of rows"
    if streaming or sequences > 1 or rows > 1:
        raise InvalidRequest(f"{name} needs a decoupled deployment; Streaming is only supported with `decoupled: true`")


def _decode(name: str, value: bytes | str) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _refuse_unless_neutral(tensor: Tensor, array: np.ndarray) -> None:
    values = set(array.reshape(-1).tolist()) if array.dtype == np.object_ else np.unique(array).tolist()
    if any(value != tensor.neutral for value in values):
        alias = _ENSEMBLE_NAME_OF.get(tensor.name)
        name = f"{tensor.name} (the ensemble's {alias})" if alias else tensor.name
        raise UnsupportedFeature(f"{name} is not supported by this engine: {tensor.doc}")
