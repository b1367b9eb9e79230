"""Reads the engine stage's arrays into requests for the engine. Knows arrays and the contract; not Triton."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from inflight.contract import ENGINE_INPUTS
from inflight.engine.kvcache.retention import Retention, retention_of
from inflight.engine.request import Request
from inflight.errors import InvalidRequest
from inflight.inputs import Inputs, check_count, check_token_words, check_words
from inflight.sampling import MAX_SEED, Guide, SamplingParams
from inflight.settings.deployment import LimitSettings

_MAX_CLIENT_ID = 256


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a request wants its answers."""

    streaming: bool
    exclude_input: bool
    heartbeat: bool
    log_probs: bool
    perf_metrics: bool
    final_perf_metrics: bool
    num_input_tokens: bool
    num_output_tokens: bool
    pad_id: int
    vocab_size: int
    """Width of the logits."""
    batch_size: int
    sequences: int


@dataclass(frozen=True, slots=True)
class SubRequest:
    """One sequence of a request: which row of its batch, which of its return sequences."""

    request: Request
    batch_index: int
    sequence_index: int

    @property
    def has_scores(self) -> bool:
        """Whether something comes with each token."""
        return self.request.sampling.log_probs or self.request.sampling.generation_logits


def read_request(
    arrays: Mapping[str, np.ndarray],
    request_id: str,
    limits: LimitSettings,
    vocab_size: int,
    decoupled: bool,
    engine: str,
) -> tuple[OutputOptions, list[SubRequest]]:
    """Read one Triton request: how it wants its answers, and its sequences (batch rows x num_return_sequences).

    ``engine`` is the deployment's ``engine.kind``: what it does not serve is refused.

    Raises:
        InvalidRequest, UnsupportedFeature: by name.
    """
    ids = arrays.get("input_ids")
    if ids is None or not ids.size:
        raise InvalidRequest("input_ids is missing or empty")
    inputs = Inputs(arrays, ENGINE_INPUTS, rows=len(ids), engine=engine)
    options = _options(inputs, limits, vocab_size)
    if not decoupled and (options.streaming or options.sequences > 1):
        name = "streaming" if options.streaming else "num_return_sequences above 1"
        raise InvalidRequest(f"{name} needs a decoupled deployment; Streaming is only supported with `decoupled: true`")
    subrequests = []
    check_words(inputs, ["stop_strings"], limits)
    check_count(inputs, "end_ids", limits.max_words)
    check_count(inputs, "retention_token_range_starts", limits.max_words)
    for row in range(inputs.rows):
        prompt = _prompt(inputs, ids, row)
        sampling = _sampling(inputs, row, limits, vocab_size)
        priority, lora = inputs.scalar("priority", row, 0), inputs.string("lora_name", row)
        deadline = _deadline_ns(inputs, row)
        client = inputs.string("client_id", row) or ""
        if len(client) > _MAX_CLIENT_ID:
            raise InvalidRequest(f"client_id has {len(client)} characters; it may have {_MAX_CLIENT_ID}")
        retention = _retention(inputs, row, len(prompt))
        for sequence in range(options.sequences):
            if sequence and sampling.seed is not None:  # the sequences must differ from each other, repeatably
                sampling = replace(sampling, seed=(sampling.seed + 1) % (MAX_SEED + 1))
            request = Request(prompt, sampling, request_id, priority, lora, deadline, client, retention)
            subrequests.append(SubRequest(request, row, sequence))
    return options, subrequests


def _options(inputs: Inputs, limits: LimitSettings, vocab_size: int) -> OutputOptions:
    sequences = _common(inputs, "num_return_sequences", 1)
    if not 1 <= sequences <= limits.max_return_sequences:
        limit = limits.max_return_sequences
        raise InvalidRequest(f"num_return_sequences is {sequences}; it must be between 1 and {limit}")
    if _common(inputs, "beam_width", 1) > 1 and sequences > 1:
        raise InvalidRequest("num_return_sequences is above 1; with beam_width above 1 every beam is returned")

    def flag(name: str) -> bool:
        return bool(_common(inputs, name, False))

    return OutputOptions(
        streaming=flag("streaming"),
        exclude_input=flag("exclude_input_in_output"),
        heartbeat=flag("heartbeat"),
        log_probs=flag("return_log_probs"),
        perf_metrics=flag("return_perf_metrics"),
        final_perf_metrics=flag("final_perf_metrics"),
        num_input_tokens=flag("return_num_input_tokens"),
        num_output_tokens=flag("return_num_output_tokens"),
        pad_id=_common(inputs, "pad_id", 0),
        vocab_size=vocab_size,
        batch_size=inputs.rows,
        sequences=sequences,
    )


def _common(inputs: Inputs, name: str, default: Any) -> Any:
    """Return a value that a whole request has: its rows must agree."""
    values = {inputs.scalar(name, row, default) for row in range(inputs.rows)}
    if len(values) > 1:
        raise InvalidRequest(f"{name} differs between the rows of the batch; one request has one")
    return values.pop()


def _prompt(inputs: Inputs, ids: np.ndarray, row: int) -> list[int]:
    length = inputs.scalar("input_lengths", row, ids.shape[-1])
    if not 1 <= length <= ids.shape[-1]:
        raise InvalidRequest(
            f"input_lengths is {length}; it must be between 1 and {ids.shape[-1]}, the width of input_ids"
        )
    prompt: list[int] = ids[row].reshape(-1)[:length].tolist()
    return prompt


def _sampling(inputs: Inputs, row: int, limits: LimitSettings, vocab_size: int) -> SamplingParams:
    max_tokens = inputs.scalar("request_output_len", row)
    if max_tokens is None or max_tokens < 1:
        given = "not present in the request" if max_tokens is None else max_tokens
        raise InvalidRequest(f"request_output_len is {given}; it must be at least 1")
    top_p = inputs.scalar("runtime_top_p", row, 1.0)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=inputs.scalar("min_tokens", row, 0),
        temperature=_temperature(inputs, row),
        # Upstream ignores a top_p of 0 or less, and its clients send 0.0 by default.
        top_p=1.0 if top_p <= 0 else top_p,
        top_k=inputs.scalar("runtime_top_k", row, 0),
        min_p=inputs.scalar("min_p", row, 0.0),
        repetition_penalty=inputs.scalar("repetition_penalty", row, 1.0),
        presence_penalty=inputs.scalar("presence_penalty", row, 0.0),
        frequency_penalty=inputs.scalar("frequency_penalty", row, 0.0),
        seed=inputs.scalar("seed", row),
        beam_width=inputs.scalar("beam_width", row, 1),
        length_penalty=inputs.scalar("len_penalty", row, 0.0),
        early_stopping=bool(inputs.scalar("early_stopping", row, True)),
        end_ids=_end_ids(inputs, row),
        ignore_eos=bool(inputs.scalar("ignore_eos", row, False)),
        stop_strings=tuple(inputs.strings("stop_strings", row)),
        stop_sequences=_words(inputs, "stop_words_list", row, limits),
        bad_sequences=_words(inputs, "bad_words_list", row, limits),
        logit_bias=_bias(inputs.vector("embedding_bias", row), vocab_size),
        guide=Guide.read(inputs.string("guided_decoding_guide_type", row), inputs.string("guided_decoding_guide", row)),
        log_probs=bool(inputs.scalar("return_log_probs", row, False)),
        top_log_probs=inputs.scalar("num_top_log_probs", row, 0),
        context_logits=bool(inputs.scalar("return_context_logits", row, False)),
        generation_logits=bool(inputs.scalar("return_generation_logits", row, False)),
    )


def _temperature(inputs: Inputs, row: int) -> float | None:
    """Return the temperature, or None for greedy.

    Upstream samples only when a request says so, and its clients always send temperature 1.0, for greedy too: 1.0
    alone is greedy; with top_k, top_p, min_p or a seed beside it, or any other value, it samples.
    """
    temperature: float | None = inputs.scalar("temperature", row)
    if temperature not in (None, 1.0):
        return temperature
    restricts = inputs.scalar("runtime_top_p", row, 0.0) > 0 or "runtime_top_k" in inputs
    return 1.0 if restricts or "min_p" in inputs or "seed" in inputs else None


def _end_ids(inputs: Inputs, row: int) -> frozenset[int]:
    end_id = inputs.scalar("end_id", row)
    if end_id is None:
        return frozenset(inputs.vector("end_ids", row).reshape(-1).tolist())
    if end_id < -1:
        raise InvalidRequest(f"end_id is {end_id}; it must be a token id, or -1 for none")
    return frozenset() if end_id == -1 else frozenset({end_id})


def _deadline_ns(inputs: Inputs, row: int) -> int | None:
    milliseconds = inputs.scalar("deadline_ms", row)
    if milliseconds is None:
        return None
    if milliseconds < 1:
        raise InvalidRequest(f"deadline_ms is {milliseconds}; it must be at least 1")
    return time.time_ns() + milliseconds * 1_000_000


def _retention(inputs: Inputs, row: int, prompt_tokens: int) -> Retention:
    names = ("starts", "ends", "priorities", "durations_ms")
    ranges = (inputs.vector(f"retention_token_range_{name}", row).reshape(-1).tolist() for name in names)
    starts, ends, priorities, durations_ms = ranges
    return retention_of(
        starts,
        ends,
        priorities,
        durations_ms,
        inputs.scalar("retention_decode_priority", row),
        inputs.scalar("retention_decode_duration_ms", row),
        prompt_tokens,
    )


def _words(inputs: Inputs, name: str, row: int, limits: LimitSettings) -> tuple[tuple[int, ...], ...]:
    """Read upstream's layout of word lists: row 0 all ids joined, row 1 the end offsets, padded with -1."""
    if name not in inputs:
        return ()
    ids, offsets = inputs.vector(name, row)
    check_token_words(name, ids, offsets, limits)
    ends = [end for end in offsets.tolist() if end >= 0]
    starts = [0, *ends[:-1]]
    if any(end <= start for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > len(ids)):
        raise InvalidRequest(f"{name} has end offsets {ends}; they must rise, and not pass {len(ids)}, its width")
    return tuple(tuple(ids[start:end].tolist()) for start, end in zip(starts, ends, strict=True))


def _bias(bias: np.ndarray, vocab_size: int) -> dict[int, float]:
    if bias.size not in (0, vocab_size):
        raise InvalidRequest(f"embedding_bias has {bias.size} values; it must have one per token, {vocab_size}")
    tokens = np.flatnonzero(bias)
    return dict(zip(tokens.tolist(), bias[tokens].tolist(), strict=True))
