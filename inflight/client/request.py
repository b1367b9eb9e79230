"""GenerateOptions, and the one place that turns a prompt and options into the tensors of the ensemble.

The names of the options are the names of the tensors, and their types come from the contract's table. What is not set
is not sent: every default is the server's. Knows nothing of gRPC or HTTP.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from uuid import uuid4

import numpy as np

from inflight import contract
from inflight.errors import InvalidRequest

Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or a chat: ``[{"role": "user", "content": "..."}]``."""

NUMPY_TYPES: dict[str, type[Any]] = {
    contract.BOOL: np.bool_,
    contract.UINT8: np.uint8,
    contract.INT32: np.int32,
    contract.INT64: np.int64,
    contract.UINT64: np.uint64,
    contract.FP16: np.float16,
    contract.FP32: np.float32,
}
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character: a string of Python's, and one of JSON, may have it alone, and no encoding has it."""
TRACE_HEADERS = ("traceparent", "tracestate")
INPUTS = {tensor.name: tensor for tensor in (*contract.ENSEMBLE_INPUTS, contract.ENGINE_INPUT["inspect"])}
"""What a request may carry: the ensemble's inputs, and the one of the engine that asks for no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """How to answer one prompt. None leaves the choice to the server; without any option the answer is greedy."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    """0: greedy."""
    top_k: int | None = None
    """0: all tokens; 1: greedy."""
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    prompt_ignore_length: int | None = None
    """So many of the prompt's first tokens do not count for presence and frequency penalties."""
    seed: int | None = None
    stop_words: Sequence[str] | None = None
    """Strings that end the answer; never shown."""
    bad_words: Sequence[str] | None = None
    """Words that must not be generated."""
    embedding_bias_words: Sequence[str] | None = None
    """Words whose tokens get the bias at the same place of ``embedding_bias_weights``."""
    embedding_bias_weights: Sequence[float] | None = None
    end_id: int | None = None
    """End id in place of the checkpoint's; -1: none."""
    pad_id: int | None = None
    ignore_eos: bool | None = None
    beam_width: int | None = None
    """Beams of beam search; the second and later are ``Completion.alternatives``."""
    length_penalty: float | None = None
    """A beam's score is its log-prob over its length to this power."""
    num_return_sequences: int | None = None
    """Independent samples; the second and later are ``Completion.alternatives``."""
    return_log_probs: bool | None = None
    num_top_log_probs: int | None = None
    """The likeliest tokens to report at each position, at most 20."""
    num_prompt_log_probs: int | None = None
    """Report the prompt's log-probs, and so many of the likeliest tokens at each of its positions: 0 to 20."""
    log_prob_token_ids: Sequence[int] | None = None
    """Tokens whose log-probs to report at each position."""
    pooling: str | None = None
    """Generate nothing, and return an embedding of the prompt: of its ``last`` token, or the ``mean`` of all."""
    return_num_input_tokens: bool | None = None
    return_num_output_tokens: bool | None = None
    return_num_cached_tokens: bool | None = None
    return_perf_metrics: bool | None = None
    final_perf_metrics: bool | None = None
    """The same figures with the last response only, which costs a stream less."""
    lora_name: str | None = None
    """LoRA adapter, by its name in the deployment."""
    guided_decoding_guide_type: str | None = None
    """What the answer must be: json, json_schema, regex, ebnf_grammar, structural_tag, lark_grammar or choice."""
    guided_decoding_guide: str | None = None
    """The schema, regular expression, grammar or tags; for choice a JSON list of texts."""
    guide_start_ids: Sequence[int] | None = None
    """The guide holds only behind these generated tokens, such as those that end a model's reasoning."""
    priority: int | None = None
    """Higher is served first."""
    deadline_ms: int | None = None
    """Milliseconds from arrival after which the server ends the request."""
    client_id: str | None = None
    """The client whose request it is, where clients take turns (``batching.fairness``)."""
    resumed_ids: Sequence[int] | None = None
    """The tokens that an earlier run of this very request has generated: the answer goes on behind them.

    A stream of a client with ``Retry(resume=True)`` does this by itself.
    """
    resumed_log_probs: Sequence[float] | None = None
    """Their log-probs; needed with ``return_log_probs``."""
    return_token_ids: bool | None = None
    """Fill ``Completion.token_ids`` and ``used_seed``, which a later request can be resumed with."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template; only with messages."""
    exclude_input_in_output: bool = True
    """False: an answer that is not streamed begins with the prompt."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as every transport sends it."""

    inputs: dict[str, list[Any]]
    """Tensor name to its values: the tensor is ``[1, len(values)]``; BYTES as ``str``."""
    id: str = ""
    sequences: int = 1
    """How many sequences must end before the answer is complete."""
    top_log_probs: int = 0
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """W3C headers."""
    log_prob_ids: int = 0
    """How many tokens' log-probs are reported at each position."""
    index: int = 0
    """Which of the sequences it asks for, where each is asked for by a request of its own."""


def build_request(
    prompt: Prompt,
    options: GenerateOptions,
    *,
    stream: bool,
    request_id: str = "",
    trace_context: Mapping[str, str] | None = None,
) -> Request:
    """Return the request for ``prompt``; a stream gets an id of its own if it has none, since some engines need one.

    With ``trace_context`` None the request belongs to the caller's current OpenTelemetry span, if there is one.

    Raises:
        InvalidRequest: naming the field, for a value that its tensor cannot carry. Ranges are the server's to judge.
    """
    inputs: dict[str, list[Any]] = {}
    if isinstance(prompt, str):
        inputs["text_input"] = [prompt]
    elif not isinstance(prompt, Sequence) or not all(isinstance(message, Mapping) for message in prompt):
        raise InvalidRequest(f"the prompt is {prompt!r}; it must be a text or a list of chat messages")
    else:
        messages: Sequence[Any] = prompt
        inputs["messages"] = [_json("messages", [dict(message) for message in messages])]
    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(value, Mapping):
            value = _json(option.name, dict(value))
        if value is not None:
            inputs[option.name] = _values(option.name, value)
    inputs["stream"] = [stream]
    checked = {name: [_checked(name, value) for value in values] for name, values in inputs.items() if values}
    if stream and not request_id:
        request_id = uuid4().hex
    sequences, top_log_probs = options.num_return_sequences or 1, options.num_top_log_probs or 0
    given = len(options.log_prob_token_ids or ())
    return Request(checked, request_id, sequences, top_log_probs, trace_headers(trace_context), given)


def trace_headers(given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers that a request carries: those given or, with None, those of the caller's current span.

    Raises:
        InvalidRequest: naming what is no such header, or cannot be one's value.
    """
    if given is None:
        headers: dict[str, str] = {}
        if "opentelemetry.trace" in sys.modules:  # an application that never imported OpenTelemetry has no span
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            TraceContextTextMapPropagator().inject(headers)
        return headers
    for name, value in given.items():
        if name not in TRACE_HEADERS:
            raise InvalidRequest(f"trace_context has {name!r}; it may have {' and '.join(TRACE_HEADERS)}")
        if not isinstance(value, str) or not value.isascii() or not value.isprintable():
            raise InvalidRequest(f"trace_context has {name} {value!r}; it must be printable ASCII")
    return dict(given)


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from error


def _values(name: str, value: Any) -> list[Any]:
    several = INPUTS[name].dims == (-1,)
    if several and (isinstance(value, str) or not isinstance(value, Sequence)):
        raise InvalidRequest(f"{name} is {value!r}; it must be a list")
    return list(value) if several else [value]


def _checked(name: str, value: Any) -> Any:
    dtype = INPUTS[name].dtype
    if dtype == contract.BYTES:
        good = isinstance(value, str) and not SURROGATE.search(value)
    elif dtype == contract.BOOL:
        good = isinstance(value, bool)
    elif dtype in (contract.FP16, contract.FP32):
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        value = float(value) if good else value
    else:
        limits = np.iinfo(NUMPY_TYPES[dtype])
        good = isinstance(value, int) and not isinstance(value, bool) and limits.min <= value <= limits.max
    if not good:
        raise InvalidRequest(f"{name} is {value!r}; it must be {_WANTED[dtype]}")
    return value


_WANTED = {
    contract.BYTES: "text that UTF-8 can carry",
    contract.BOOL: "true or false",
    contract.INT32: "a whole number of 32 bits",
    contract.UINT64: "a whole number from 0 to 2**64 - 1",
    contract.FP32: "a finite number",
}
