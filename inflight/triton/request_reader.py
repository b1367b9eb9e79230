"""Reads the engine stage's input arrays into engine requests. Knows arrays and the contract; not Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast, get_type_hints

import numpy as np

from inflight.clock import now_ns
from inflight.contract import ENGINE_INPUTS
from inflight.engine.kvcache.retention import Retention, retention_of
from inflight.engine.request import Request
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.inputs import (
    MOST_CLIENT_ID,
    Inputs,
    check_number,
    check_one_response,
    check_sequences,
    check_words,
    given_end_ids,
    read_sampling,
)
from inflight.sampling import MAX_SEED, Guide, Pooling, SamplingParams
from inflight.settings.deployment import LimitSettings
from inflight.settings.guided import MOST_GUIDE_BYTES

_SAMPLING_INPUTS = {
    **{name: name for name in "temperature min_p min_tokens seed beam_width early_stopping ignore_eos".split()},
    **{name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")},
    "prompt_ignore_length": "prompt_ignore_length",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "log_probs": "return_log_probs",
    "top_log_probs": "num_top_log_probs",
    "prompt_log_probs": "num_prompt_log_probs",
    "context_logits": "return_context_logits",
    "generation_logits": "return_generation_logits",
}
"""The fields of ``SamplingParams`` that are one value each, with the inputs that give them."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The outputs that a request asks for; the flags have the names of their tensors."""

    streaming: bool
    exclude_input_in_output: bool
    heartbeat: bool
    return_log_probs: bool
    return_perf_metrics: bool
    final_perf_metrics: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    pad_id: int
    vocab_size: int
    """Width of the logits."""
    batch_size: int
    sequences: int
    return_num_cached_tokens: bool = False
    return_token_ids: bool = False


_FLAGS = [name for name, kind in get_type_hints(OutputOptions).items() if kind is bool]


@dataclass(frozen=True, slots=True)
class SubRequest:
    """One sequence of a Triton request: a row of its batch and one of that row's return sequences."""

    request: Request
    batch_index: int
    sequence_index: int


def read_request(
    arrays: Mapping[str, np.ndarray],
    request_id: str,
    limits: LimitSettings,
    vocab_size: int,
    decoupled: bool,
    engine: str,
    max_sequences: int,
    client: str = "",
    by_client: bool = False,
    most_guide_bytes: int = MOST_GUIDE_BYTES,
) -> tuple[OutputOptions, list[SubRequest]]:
    """Read one Triton request: how it wants its answers, and its sequences (batch rows x num_return_sequences).

    ``engine`` is the deployment's ``engine.kind``: what it does not serve is refused. ``max_sequences``: as many as the
    queue takes; more are refused before any of them is read, which takes milliseconds each. ``client`` is who asks, as
    the door or the gateway says, "" where neither does: then the request may, if clients take turns (``by_client``). A
    guide of more bytes than ``most_guide_bytes`` is not read.

    Raises:
        InvalidRequest, UnsupportedFeature: by name.
    """
    ids = arrays.get("input_ids")
    if ids is None or not ids.size:
        raise InvalidRequest("input_ids is missing or empty")
    inputs = Inputs(arrays, ENGINE_INPUTS, rows=len(ids), engine=engine)
    options = _options(inputs, limits, vocab_size)
    if (count := inputs.rows * options.sequences) > max_sequences:
        raise InvalidRequest(
            f"the request has {count} sequences (rows times num_return_sequences); the queue takes {max_sequences}"
        )
    if not decoupled:
        check_one_response(options.streaming, options.sequences)
    subrequests = []
    check_words(inputs, ["stop_strings"], limits)
    for name in ("end_ids", "log_prob_token_ids", "retention_token_range_starts"):
        check_number(name, inputs.vector(name, 0).size, limits.max_words)
    for row in range(inputs.rows):
        prompt = _prompt(inputs, ids, row)
        sampling = _sampling(inputs, row, limits, vocab_size, most_guide_bytes)
        priority, lora = inputs.scalar("priority", row, 0), inputs.string("lora_name", row)
        deadline = _deadline_ns(inputs, row)
        asking = _client(inputs, row, client, by_client)
        retention = _retention(inputs, row, len(prompt))
        resumed_ids, log_prob = _resumed(inputs, options, sampling)
        for sequence in range(options.sequences):
            if sequence:
                sampling = _next_sequence(sampling)
            request = Request(
                prompt, sampling, request_id, priority, lora, deadline, asking, retention,
                resumed_ids=resumed_ids, resumed_log_prob=log_prob,
            )  # fmt: skip
            subrequests.append(SubRequest(request, row, sequence))
    return options, subrequests


def _next_sequence(sampling: SamplingParams) -> SamplingParams:
    """Return what another sequence of the same prompt is sampled by: with a seed of its own, always the same.

    The log-probs of the prompt come with the first sequence; the others can use the prefix cache.
    """
    if sampling.seed is None and sampling.prompt_log_probs is None:
        return sampling  # the sequences share what was read
    seed = None if sampling.seed is None else (sampling.seed + 1) % (MAX_SEED + 1)
    return replace(sampling, seed=seed, prompt_log_probs=None)


def _options(inputs: Inputs, limits: LimitSettings, vocab_size: int) -> OutputOptions:
    sequences = inputs.common("num_return_sequences", 1)
    check_sequences(sequences, limits)
    if inputs.common("beam_width", 1) > 1 and sequences > 1:
        raise InvalidRequest("num_return_sequences is above 1; with beam_width above 1 every beam is returned")
    if inputs.common("return_token_ids", False) and inputs.common("beam_width", 1) > 1:
        raise UnsupportedFeature("return_token_ids is not supported with beam_width above 1, which cannot be resumed")
    if sequences > 1 and "pooling" in inputs:
        raise InvalidRequest("num_return_sequences is above 1; a prompt has one embedding (pooling)")
    return OutputOptions(
        **{name: bool(inputs.common(name, False)) for name in _FLAGS},
        pad_id=inputs.common("pad_id", 0),
        vocab_size=vocab_size,
        batch_size=inputs.rows,
        sequences=sequences,
    )


def _prompt(inputs: Inputs, ids: np.ndarray, row: int) -> list[int]:
    length = inputs.scalar("input_lengths", row, ids.shape[-1])
    if not 1 <= length <= ids.shape[-1]:
        limit = f"{ids.shape[-1]}, the width of input_ids"
        raise InvalidRequest(f"input_lengths is {length}; it must be between 1 and {limit}")
    return ids[row].reshape(-1)[:length].tolist()


def _sampling(
    inputs: Inputs, row: int, limits: LimitSettings, vocab_size: int, most_guide_bytes: int
) -> SamplingParams:
    pooling = inputs.string("pooling", row)
    max_tokens = inputs.scalar("request_output_len", row) if pooling is None else 1
    if max_tokens is None or max_tokens < 1:
        given = "not present in the request" if max_tokens is None else max_tokens
        raise InvalidRequest(f"request_output_len is {given}; it must be at least 1")
    end_ids = given_end_ids(inputs, row)
    if end_ids and end_ids[0] >= vocab_size:  # such an answer would never end
        raise InvalidRequest(f"end_id is {end_ids[0]}; it must be a token id below {vocab_size}, or -1 for none")
    if end_ids is None:
        end_ids = inputs.vector("end_ids", row).reshape(-1).tolist()
    return SamplingParams(
        max_tokens=max_tokens,
        pooling=cast(Pooling | None, pooling),
        log_prob_ids=tuple(inputs.vector("log_prob_token_ids", row).reshape(-1).tolist()),
        **read_sampling(inputs, row, _SAMPLING_INPUTS),
        end_ids=frozenset(end_ids),
        stop_strings=tuple(inputs.strings("stop_strings", row)),
        stop_sequences=_words(inputs, "stop_words_list", row, limits),
        bad_sequences=_words(inputs, "bad_words_list", row, limits),
        logit_bias=_bias(inputs.vector("embedding_bias", row), vocab_size),
        guide=_guide(inputs, row, most_guide_bytes),
    )


def _guide(inputs: Inputs, row: int, most: int) -> Guide | None:
    """Return the guide. One of more bytes than ``most`` is refused before it is decoded and read."""
    check_number("guided_decoding_guide", len(inputs.scalar("guided_decoding_guide", row, b"")), most, "bytes")
    start_ids = inputs.vector("guide_start_ids", row).reshape(-1).tolist()
    kind, text = (inputs.string(f"guided_decoding_{name}", row) for name in ("guide_type", "guide"))
    return Guide.read(kind, text, tuple(start_ids))


def _resumed(inputs: Inputs, options: OutputOptions, sampling: SamplingParams) -> tuple[list[int], float]:
    """Read what an earlier run of the request has generated; return its ids and the sum of their log-probs."""
    ids, log_probs = (inputs.vector(name, 0).reshape(-1) for name in ("resumed_ids", "resumed_log_probs"))
    if ids.size:
        others = {"num_return_sequences above 1": options.sequences > 1, "a batch of rows": inputs.rows > 1}
        for name in (name for name, asked in (others | {"pooling": sampling.pooling is not None}).items() if asked):
            raise UnsupportedFeature(f"{name} is not supported with resumed_ids, which are those of one sequence")
        if not (options.streaming or options.exclude_input_in_output):
            raise InvalidRequest("exclude_input_in_output is false; with resumed_ids only new text is returned")
        if ids.size >= sampling.max_tokens:
            most = sampling.max_tokens
            raise InvalidRequest(f"resumed_ids has {ids.size} tokens; it must have fewer than max_tokens, {most}")
    wanted = ids.size if sampling.log_probs else 0
    if log_probs.size != wanted:
        limit = f"{wanted}: one for each of resumed_ids with return_log_probs, and else none"
        raise InvalidRequest(f"resumed_log_probs has {log_probs.size} values; it must have {limit}")
    log_prob = sum(log_probs.tolist())
    if not abs(log_prob) <= np.finfo(np.float32).max:  # cum_log_probs begin with it; JSON has no infinity, and no NaN
        raise InvalidRequest(f"resumed_log_probs has the sum {log_prob}; it must be a finite number of 32 bits")
    return ids.tolist(), log_prob


def _client(inputs: Inputs, row: int, client: str, by_client: bool) -> str:
    """Return who asks: ``client``, or who the request says where that is ""; docs/contract.md tells of it."""
    named = inputs.string("client_id", row) or ""
    if named and not by_client:
        raise UnsupportedFeature("client_id is not supported by this deployment; set `batching.fairness: client`")
    if len(named) > MOST_CLIENT_ID:
        raise InvalidRequest(f"client_id has {len(named)} characters; it may have {MOST_CLIENT_ID}")
    return client or named


def _deadline_ns(inputs: Inputs, row: int) -> int | None:
    milliseconds = inputs.scalar("deadline_ms", row)
    if milliseconds is None:
        return None
    if milliseconds < 1:
        raise InvalidRequest(f"deadline_ms is {milliseconds}; it must be at least 1")
    return now_ns() + milliseconds * 1_000_000


def _retention(inputs: Inputs, row: int, prompt_tokens: int) -> Retention:
    names = ("starts", "ends", "priorities", "durations_ms")
    ranges = (inputs.vector(f"retention_token_range_{name}", row).reshape(-1).tolist() for name in names)
    starts, ends, priorities, durations_ms = ranges
    priority, duration_ms = (inputs.scalar(f"retention_decode_{name}", row) for name in ("priority", "duration_ms"))
    return retention_of(starts, ends, priorities, durations_ms, priority, duration_ms, prompt_tokens)


def _words(inputs: Inputs, name: str, row: int, limits: LimitSettings) -> tuple[tuple[int, ...], ...]:
    """Read upstream's layout of word lists: row 0 all ids joined, row 1 the end offsets, padded with -1."""
    if name not in inputs:
        return ()
    ids, offsets = inputs.vector(name, row)
    # The tokenizer stage spells each word in two ways, one with a space before it; a token stands for a byte at least.
    check_number(name, int((offsets >= 0).sum()), 2 * limits.max_words, "words")
    check_number(name, ids.size, 2 * (limits.max_words + limits.max_words_bytes), "token ids")
    ends = [end for end in offsets.tolist() if end >= 0]
    starts = [0, *ends][: len(ends)]
    if any(end <= start for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > len(ids)):
        raise InvalidRequest(f"{name} has end offsets {ends}; they must rise, and not pass {len(ids)}, its width")
    return tuple(tuple(ids[start:end].tolist()) for start, end in zip(starts, ends, strict=True))


def _bias(bias: np.ndarray, vocab_size: int) -> dict[int, float]:
    if bias.size not in (0, vocab_size):
        raise InvalidRequest(f"embedding_bias has {bias.size} values; it must have one per token, {vocab_size}")
    tokens = np.flatnonzero(bias)
    return dict(zip(tokens.tolist(), bias[tokens].tolist(), strict=True))
