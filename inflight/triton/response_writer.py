"""Makes the engine stage's response arrays of the engine's outputs. Knows arrays and the contract; not Triton."""

from __future__ import annotations

from collections import abc
from dataclasses import replace

import numpy as np

from inflight.engine.request import PER_TOKEN, Output, Request
from inflight.triton.request_reader import OutputOptions, SubRequest

Arrays = dict[str, np.ndarray]

FAILURE = "failure"
_PADDED = ("token_ids", "output_log_probs", "prompt_log_probs", "prompt_top_log_prob_ids", "prompt_top_log_probs")
"""What has -1 behind a short row of a batch."""


def split_last(output: Output) -> list[Output]:
    """Return the output in two: the tokens before the last one, if there are any, and the last one with the rest."""
    if len(output.tokens) < 2:
        return [output]
    per_token = {name: getattr(output, name) for name in PER_TOKEN}
    before = {name: values and values[:-1] for name, values in per_token.items()}
    last = {name: values and values[-1:] for name, values in per_token.items()}
    first = replace(output, **before, context_logits=None, finish_reason=None, error=None)
    if first.text_limits:  # its text must not depend on a token that it does not have
        first.text_limit = first.text_limits[-1]
    return [first, replace(output, **last, prompt_scores=None)]


def heartbeat_arrays(key: int) -> Arrays:
    """Return a response without tokens, at which the detokenizer can notice that the client has gone."""
    return {
        "output_ids": np.zeros((1, 1, 0), np.int32),
        "sequence_length": np.zeros((1, 1), np.int32),
        "stream_key": np.array([[key]], np.int64),
    }


def failure_arrays(key: int, code: str, message: str) -> Arrays:
    """Return the last response of a request that fails; the detokenizer makes the client's error of it.

    The engine stage does not send an error itself. An error to a client that has gone leaves the request in flight in
    Triton (2.51), which then waits for it at its shutdown, and only the detokenizer learns that a client has gone.
    """
    told = np.array([[code.encode(), message.encode()]], np.object_)
    return heartbeat_arrays(key) | {"finish_reason": np.array([[b"cancelled"]], np.object_), FAILURE: told}


def to_arrays(
    output: Output, subrequest: SubRequest, options: OutputOptions, generated: int, cum_log_prob: float
) -> Arrays:
    """Return the arrays of one response of a sequence: its new ``output``, as the request asked for it.

    ``generated`` and ``cum_log_prob`` cover all its tokens so far, including this output's.
    """
    hidden = options.streaming or options.exclude_input_in_output or output.embedding is not None
    echo = [] if hidden else subrequest.request.prompt
    rows = [echo + output.tokens] if output.beams is None else [[*echo, *beam.tokens] for beam in output.beams]
    arrays: Arrays = {
        "output_ids": _beams(rows, np.int32),
        "sequence_length": np.array([[len(row) for row in rows]], np.int32),
        "stream_key": np.array([[output.key]], np.int64),
    }
    if output.finish_reason is not None:
        arrays["finish_reason"] = np.array([[output.finish_reason.value.encode()]], np.object_)
    numbers = {
        "echo_length": len(echo) or None,
        "text_limit": output.text_limit,
        "batch_index": subrequest.batch_index if options.batch_size > 1 else None,
        "sequence_index": subrequest.sequence_index if options.sequences > 1 else None,
        "num_input_tokens": len(subrequest.request.prompt) if options.return_num_input_tokens else None,
        "num_output_tokens": generated if options.return_num_output_tokens else None,
    }
    if options.return_num_cached_tokens and output.finished and (metrics := output.metrics) is not None:
        numbers |= {"num_cached_tokens": metrics.cached_tokens, "num_cache_write_tokens": metrics.written_tokens}
    arrays |= {name: np.array([[value]], np.int32) for name, value in numbers.items() if value is not None}
    if options.return_token_ids:
        arrays["token_ids"] = np.array([output.tokens], np.int32)
    return arrays | _scores(output, subrequest, options, cum_log_prob) | _metrics(output, options)


def opening(request: Request, options: OutputOptions) -> Arrays:
    """Return what the first response of a sequence carries besides: what it is sampled by, and what was resumed."""
    arrays: Arrays = {}
    if options.return_token_ids and request.seed is not None and not request.sampling.greedy:
        arrays["used_seed"] = np.array([[request.seed]], np.uint64)
    if options.heartbeat and request.resumed_ids:  # the detokenizer follows
        arrays["resumed_output_ids"] = np.array([request.resumed_ids], np.int32)
        if request.resumed_text_limit is not None:
            arrays["resumed_text_limit"] = np.array([[request.resumed_text_limit]], np.int32)
    return arrays


def _scores(output: Output, subrequest: SubRequest, options: OutputOptions, cum_log_prob: float) -> Arrays:
    arrays: Arrays = {}
    sampling = subrequest.request.sampling
    if options.return_log_probs:
        cums = [cum_log_prob] if output.beams is None else [beam.cum_log_prob for beam in output.beams]
        rows = [output.log_probs or []] if output.beams is None else [beam.log_probs for beam in output.beams]
        arrays["cum_log_probs"] = np.array([cums], np.float32)
        arrays["output_log_probs"] = _beams(rows, np.float32)
    if output.top_log_probs:
        arrays["top_log_prob_ids"] = np.array([[[token for token, _ in row] for row in output.top_log_probs]], np.int32)
        arrays["top_log_probs"] = np.array([[[value for _, value in row] for row in output.top_log_probs]], np.float32)
    if output.token_log_probs:
        arrays["token_log_probs"] = np.array([output.token_log_probs], np.float32)
    if (prompt := output.prompt_scores) is not None:
        arrays["prompt_log_probs"] = prompt.log_probs[None]
        if sampling.prompt_log_probs:
            arrays["prompt_top_log_prob_ids"] = prompt.top_ids[None]
            arrays["prompt_top_log_probs"] = prompt.top_log_probs[None]
    if output.embedding is not None:
        arrays["embedding"] = output.embedding[None]
    if sampling.context_logits:
        arrays["context_logits"] = _logits(output.context_logits, options)[None]
    if sampling.generation_logits:
        arrays["generation_logits"] = _logits(output.generation_logits, options)[None, None]
    return arrays


def _logits(rows: abc.Sequence[np.ndarray] | np.ndarray | None, options: OutputOptions) -> np.ndarray:
    """Return ``[n, vocab]``, empty without rows: upstream's clients look for what they asked for in every response."""
    empty = np.empty((0, options.vocab_size), np.float32)
    return empty if rows is None or not len(rows) else np.asarray(rows, np.float32)


def _beams(rows: abc.Sequence[abc.Sequence[float]], dtype: type[np.generic]) -> np.ndarray:
    """Return ``[1, beams, n]``; short beams are padded with -1, as upstream does."""
    table = np.full((1, len(rows), max(map(len, rows))), -1, dtype)
    for beam, row in zip(table[0], rows, strict=True):
        beam[: len(row)] = row
    return table


def _metrics(output: Output, options: OutputOptions) -> Arrays:
    """The ten performance outputs, as of now."""
    metrics = output.metrics
    if metrics is None or not (options.return_perf_metrics or (options.final_perf_metrics and output.finished)):
        return {}
    numbers: dict[str, tuple[float, type[np.generic]]] = {
        "kv_cache_alloc_new_blocks": (metrics.new_blocks, np.int32),
        "kv_cache_reused_blocks": (metrics.reused_blocks, np.int32),
        "kv_cache_alloc_total_blocks": (metrics.total_blocks, np.int32),
        "arrival_time_ns": (metrics.arrival_ns, np.int64),
        "first_scheduled_time_ns": (metrics.first_scheduled_ns, np.int64),
        "first_token_time_ns": (metrics.first_token_ns, np.int64),
        "last_token_time_ns": (metrics.last_token_ns, np.int64),
        "acceptance_rate": (metrics.accepted_draft_tokens / max(1, metrics.draft_tokens), np.float32),
        "total_accepted_draft_tokens": (metrics.accepted_draft_tokens, np.int32),
        "total_draft_tokens": (metrics.draft_tokens, np.int32),
    }
    return {name: np.array([[value]], dtype) for name, (value, dtype) in numbers.items()}


def stack(rows: list[Arrays], pad_id: int) -> Arrays:
    """Stack the single-row responses of a batch into one response; short rows are padded, ids with ``pad_id``."""
    fills = {"output_ids": pad_id, "text_limit": np.iinfo(np.int32).max} | dict.fromkeys(_PADDED, -1)
    stacked = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != "batch_index"):
        arrays = {index: row[name] for index, row in enumerate(rows) if name in row}
        shape = np.max([array.shape for array in arrays.values()], axis=0)
        dtype = next(iter(arrays.values())).dtype
        stacked[name] = table = np.full((len(rows), *shape[1:]), fills.get(name, 0), dtype)
        for index, array in arrays.items():
            table[(index, *map(slice, array.shape[1:]))] = array[0]
    return stacked
