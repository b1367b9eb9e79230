"""Writes the engine's outputs as the engine stage's arrays. Knows arrays and the contract; not Triton."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inflight.engine.request import Output
from inflight.triton.engine_inputs import Delivery, Part

Arrays = dict[str, np.ndarray]

FAILURE = "failure"
_PER_TOKEN = ("log_probs", "top_log_probs", "generation_logits")


def join(first: Output | None, second: Output) -> Output:
    """Join two successive outputs of one sequence into one; ``first`` may be None and is used up."""
    if first is None:
        return second
    first.tokens += second.tokens
    for name in _PER_TOKEN:
        new = getattr(second, name)
        if new is not None:
            known = getattr(first, name)
            setattr(first, name, new) if known is None else known.extend(new)
    for name in ("beams", "context_logits", "text_limit", "finish_reason", "error", "metrics"):
        new = getattr(second, name)
        if new is not None:
            setattr(first, name, new)
    return first


def split_last(output: Output) -> list[Output]:
    """Return the output in two: the tokens before the last one, if there are any, and the last one with the rest."""
    if len(output.tokens) < 2:
        return [output]
    before = Output(output.key, output.tokens[:-1], text_limit=output.text_limit, metrics=output.metrics)
    output.tokens = output.tokens[-1:]
    for name in _PER_TOKEN:
        values = getattr(output, name)
        if values is not None:
            setattr(before, name, values[:-1])
            setattr(output, name, values[-1:])
    return [before, output]


def heartbeat(key: int) -> Arrays:
    """Return a response without tokens: it only lets the detokenizer notice that the client has gone."""
    return {
        "output_ids": np.zeros((1, 1, 0), np.int32),
        "sequence_length": np.zeros((1, 1), np.int32),
        "stream_key": np.array([[key]], np.int64),
    }


def failure(key: int, code: str, message: str) -> Arrays:
    """Return the last response of a request that fails; the detokenizer makes the client's error of it.

    The engine does not send that error itself: an error to a client that has gone leaves its request in flight in
    Triton (2.51), which then waits for it when it is to stop, and only the detokenizer is told who has gone.
    """
    told = np.array([[code.encode(), message.encode()]], np.object_)
    return heartbeat(key) | {"finish_reason": np.array([[b"cancelled"]], np.object_), FAILURE: told}


def write(output: Output, part: Part, delivery: Delivery, generated: int, cum_log_prob: float) -> Arrays:
    """Return the arrays of one response.

    Args:
        output: what is new.
        part: the sequence.
        delivery: what the request asked for.
        generated: tokens generated so far, this output included.
        cum_log_prob: sum of their log-probs.
    """
    echo = [] if delivery.streaming or delivery.exclude_input else part.request.prompt
    rows = [echo + output.tokens] if output.beams is None else [[*echo, *beam.tokens] for beam in output.beams]
    arrays: Arrays = {
        "output_ids": _beams(rows, np.int32),
        "sequence_length": np.array([[len(row) for row in rows]], np.int32),
        "stream_key": np.array([[output.key]], np.int64),
    }
    if echo:
        arrays["echo_length"] = np.array([[len(echo)]], np.int32)
    if output.text_limit is not None:
        arrays["text_limit"] = np.array([[output.text_limit]], np.int32)
    if output.finish_reason is not None:
        arrays["finish_reason"] = np.array([[output.finish_reason.value.encode()]], np.object_)
    if delivery.batch_size > 1:
        arrays["batch_index"] = np.array([[part.batch_index]], np.int32)
    if delivery.sequences > 1:
        arrays["sequence_index"] = np.array([[part.sequence_index]], np.int32)
    if delivery.num_input_tokens:
        arrays["num_input_tokens"] = np.array([[len(part.request.prompt)]], np.int32)
    if delivery.num_output_tokens:
        arrays["num_output_tokens"] = np.array([[generated]], np.int32)
    return arrays | _scores(output, part, delivery, cum_log_prob) | _metrics(output, delivery)


def _scores(output: Output, part: Part, delivery: Delivery, cum_log_prob: float) -> Arrays:
    arrays: Arrays = {}
    sampling = part.request.sampling
    if delivery.log_probs:
        cums = [cum_log_prob] if output.beams is None else [beam.cum_log_prob for beam in output.beams]
        rows = [output.log_probs or []] if output.beams is None else [beam.log_probs for beam in output.beams]
        arrays["cum_log_probs"] = np.array([cums], np.float32)
        arrays["output_log_probs"] = _beams(rows, np.float32)
    if output.top_log_probs:
        arrays["top_log_prob_ids"] = np.array([[[token for token, _ in row] for row in output.top_log_probs]], np.int32)
        arrays["top_log_probs"] = np.array([[[value for _, value in row] for row in output.top_log_probs]], np.float32)
    if sampling.context_logits:
        arrays["context_logits"] = _logits(output.context_logits, delivery)[None]
    if sampling.generation_logits:
        arrays["generation_logits"] = _logits(output.generation_logits, delivery)[None, None]
    return arrays


def _logits(rows: Sequence[np.ndarray] | np.ndarray | None, delivery: Delivery) -> np.ndarray:
    """Return ``[n, vocab]``, empty without rows: upstream's clients look for what they asked for in every response."""
    empty = np.empty((0, delivery.vocab_size), np.float32)
    return empty if rows is None or not len(rows) else np.asarray(rows, np.float32)


def _beams(rows: Sequence[Sequence[float]], dtype: type[np.generic]) -> np.ndarray:
    """Return ``[1, beams, n]``; short beams are padded with -1, as upstream does."""
    table = np.full((1, len(rows), max(map(len, rows))), -1, dtype)
    for beam, row in zip(table[0], rows, strict=True):
        beam[: len(row)] = row
    return table


def _metrics(output: Output, delivery: Delivery) -> Arrays:
    """The ten performance outputs, as of now."""
    metrics = output.metrics
    if metrics is None or not (delivery.perf_metrics or (delivery.final_perf_metrics and output.finished)):
        return {}
    integers = {
        "kv_cache_alloc_new_blocks": metrics.new_blocks,
        "kv_cache_reused_blocks": metrics.reused_blocks,
        "kv_cache_alloc_total_blocks": metrics.total_blocks,
        "total_accepted_draft_tokens": metrics.accepted_draft_tokens,
        "total_draft_tokens": metrics.draft_tokens,
    }
    times = {
        "arrival_time_ns": metrics.arrival_ns,
        "first_scheduled_time_ns": metrics.first_scheduled_ns,
        "first_token_time_ns": metrics.first_token_ns,
        "last_token_time_ns": metrics.last_token_ns,
    }
    arrays = {name: np.array([[value]], np.int32) for name, value in integers.items()}
    arrays |= {name: np.array([[value]], np.int64) for name, value in times.items()}
    rate = metrics.accepted_draft_tokens / metrics.draft_tokens if metrics.draft_tokens else 0.0
    arrays["acceptance_rate"] = np.array([[rate]], np.float32)
    return arrays


def stack(rows: list[Arrays], pad_id: int) -> Arrays:
    """Stack the single-row responses of a batch into one response; short rows are padded, ids with ``pad_id``."""
    names = dict.fromkeys(name for row in rows for name in row if name != "batch_index")
    fills = {"output_ids": pad_id, "output_log_probs": -1, "text_limit": np.iinfo(np.int32).max}
    return {name: _stack([row.get(name) for row in rows], fills.get(name, 0)) for name in names}


def _stack(rows: list[np.ndarray | None], fill: int) -> np.ndarray:
    """Stack arrays ``[1, ...]``; a row that lacks the tensor is all ``fill``."""
    known = next(row for row in rows if row is not None)
    empty = np.empty((1, *(0 for _ in known.shape[1:])), known.dtype)
    arrays = [empty if row is None else row for row in rows]
    shape = np.max([array.shape for array in arrays], axis=0)
    padded = []
    for array in arrays:
        width = [(0, most - size) for most, size in zip(shape, array.shape, strict=True)]
        padded.append(array if not any(map(sum, width)) else np.pad(array, width, constant_values=fill))
    return np.concatenate(padded)
