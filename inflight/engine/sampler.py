"""The sampler: it draws a step's tokens from the logits in one batch, with each request's own seed and parameters.

A token is drawn by the inverse of the distribution function at one number in [0, 1) that depends only on the request's
seed and the position. So a request's tokens do not depend on its neighbours, and preemption does not change them. The
order of application is: logit bias, bad words and min_tokens, penalties, guides, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections import abc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inflight.engine.beam_search.search import num_candidates
from inflight.engine.device import has_compiler
from inflight.engine.sequence import ALL_BANNED, NAN_LOGITS, Sampled, SamplingRow
from inflight.engine.transfer import ToHost, to_device
from inflight.sampling import SamplingParams

_FLOAT64 = {(8, 0), (9, 0), (10, 0)}
"""Compute capabilities of GPUs with fast float64: a unit for every two or four of float32, not for every 64."""


class PendingSample:
    """A step's sampled tokens on the device, which may still be computing them."""

    def __init__(self, tokens: Tensor, reports: abc.Sequence[_Report]) -> None:
        """``tokens``: int64 ``[n]``, below 0 where none could be sampled; ``reports``: what else was asked for."""
        self.tokens = tokens
        self._reports = reports
        self._kept: list[int] | None = None
        self._parts = ToHost([tokens, *(tensor for report in reports for tensor in report.tensors)])

    def of(self, rows: list[int]) -> Tensor:
        """Return the tokens of ``rows``, on the device."""
        return self.tokens if rows == list(range(len(self.tokens))) else self.tokens[_index(rows, self.tokens)]

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.tokens, self._kept = self.of(rows), rows

    def wait(self) -> list[Sampled]:
        """Wait for the device and return what was sampled for each row."""
        tokens, *parts = self._parts.wait()
        sampled = [Sampled(token) for token in tokens.tolist()]
        for report in self._reports:
            count = len(report.tensors)
            report.fill(sampled, *parts[:count])
            parts = parts[count:]
        return sampled if self._kept is None else [sampled[row] for row in self._kept]


class _Report(NamedTuple):
    """Log-probs, logits or beam candidates that requests asked for beside a step's tokens."""

    tensors: list[Tensor]
    fill: Callable[..., None]
    """Writes it into the ``list[Sampled]`` of all rows, given the tensors as arrays."""


class Draw(NamedTuple):
    """What a row's token is drawn by."""

    temperature: float
    """0: the likeliest token is taken."""
    top_k: int
    """0: all."""
    top_p: float
    min_p: float
    number: float
    """In [0, 1): where the token lies in the distribution."""


_GREEDY = Draw(0.0, 0, 1.0, 0.0, 0.0)
DrawTokens = Callable[[Tensor, abc.Sequence[Draw]], Tensor]
"""Draws a token from each row of logits, float32 ``[n, vocab]``; returns int64 ``[n]``.

The token is ``NAN_LOGITS`` where a logit is NaN, and ``ALL_BANNED`` where all are minus infinity.
"""


@torch.inference_mode()
def sample_async(logits: Tensor, sequences: abc.Sequence[SamplingRow], draw: DrawTokens | None = None) -> PendingSample:
    """Have the device sample one token per row, without waiting for it.

    Log-probs and reported logits are the model's own, before any penalty or temperature.

    Args:
        logits: float32 ``[n, vocab]``.
        sequences: whose they are.
        draw: what draws the tokens; PyTorch, or kernels on a GPU, by default.
    """
    adjusted, settings = logits, [sequence.request.sampling for sequence in sequences]
    touched = [
        row
        for row, (sequence, one) in enumerate(zip(sequences, settings, strict=True))
        if one.logit_bias or sequence.generated < one.min_tokens or one.bad_sequences or _penalizes(one)
    ]
    guided = any(one.guide is not None for one in settings)
    if touched or guided:
        adjusted = logits.clone()
        for row in touched:
            _adjust(adjusted[row], sequences[row])
        if guided:
            _mask(adjusted, sequences)
    tokens = (draw or draw_tokens)(adjusted, [_draw_of(sequence) for sequence in sequences])
    reports = (_log_probs(logits, tokens, settings), _own_logits(logits, settings), _candidates(adjusted, settings))
    return PendingSample(tokens, [report for report in reports if report is not None])


def draw_tokens(logits: Tensor, draws: abc.Sequence[Draw]) -> Tensor:
    """Draw by PyTorch, or by kernels on a GPU; see ``DrawTokens``."""
    # Both return the first of equal logits; on a CPU numpy is ten times as fast.
    on_cpu = logits.device.type == "cpu"
    tokens = torch.from_numpy(logits.numpy().argmax(-1)) if on_cpu else logits.argmax(dim=-1)
    largest = logits.gather(-1, tokens[:, None])[:, 0]  # NaN if any logit is: argmax takes it for the largest
    drawn = [row for row, one in enumerate(draws) if one.temperature]
    if drawn:
        index = _index(drawn, logits)
        tokens[index] = _draw(logits[index], [draws[row] for row in drawn])
    return tokens.masked_fill(largest == -torch.inf, ALL_BANNED).masked_fill(largest.isnan(), NAN_LOGITS)


def needs_tokens(sampling: SamplingParams) -> bool:
    """Whether sampling depends on the tokens before, and not on the logits alone."""
    return bool(sampling.bad_sequences or _penalizes(sampling) or sampling.guide is not None)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) of a seed (unsigned, 64 bits) at a position."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53  # all 64 bits would round up to 1


def _penalizes(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def _index(rows: list[int], like: Tensor) -> Tensor:
    """Return an index on the device of ``like``; the host would wait for a list that is used as an index."""
    return to_device(np.array(rows, np.int64), like.device)


def _adjust(row: Tensor, sequence: SamplingRow) -> None:
    """Apply bias, bans and penalties to one row, in place.

    Repetition (arXiv:1909.05858), presence and frequency penalties all count the prompt, as upstream does; of the last
    two ``prompt_ignore_length`` leaves a part of it out.
    """
    sampling = sequence.request.sampling
    if sampling.logit_bias:
        tokens, values = (to_device(part, row.device) for part in sampling.bias_arrays)
        row[tokens] += values.to(row.dtype)
    tokens = sequence.tokens
    bad = [one for key in (None, tokens[-1]) for one in sampling.bad_sequences_by_previous.get(key, ())]
    forbidden = [one[-1] for one in bad if tuple(tokens[len(tokens) - len(one) + 1 :]) == one[:-1]]
    if sequence.generated < sampling.min_tokens and not sampling.ignore_eos:
        # Old clients send other models' end ids; one that is not in this vocabulary can be ignored.
        forbidden += [token for token in sampling.end_ids if 0 <= token < len(row)]
    if forbidden:
        row.index_fill_(0, _index(forbidden, row), -torch.inf)
    if sampling.repetition_penalty != 1.0:
        present = to_device(np.unique(tokens), row.device)
        logits, penalty = row[present], sampling.repetition_penalty
        row[present] = torch.where(logits > 0, logits / penalty, logits * penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counted = np.array(tokens[min(sampling.prompt_ignore_length, len(sequence.request.prompt)) :], np.int64)
        present, counts = (to_device(part, row.device) for part in np.unique(counted, return_counts=True))
        row[present] = row[present] - sampling.presence_penalty - sampling.frequency_penalty * counts


def _mask(logits: Tensor, sequences: abc.Sequence[SamplingRow]) -> None:
    """Forbid what guides forbid, in place; it comes last, so that no bias can allow it again."""
    from inflight.engine.guided.masks import mask_logits  # it needs llguidance, which only guides do

    guides = [None if sequence.request.sampling.guide is None else sequence.guide for sequence in sequences]
    if any(guide is not None for guide in guides):
        mask_logits(logits, guides)


def _draw_of(sequence: SamplingRow) -> Draw:
    one, position = sequence.request.sampling, len(sequence.request.prompt) + sequence.generated
    if one.greedy:
        return _GREEDY
    return Draw(one.temperature or 1.0, one.top_k, one.top_p, one.min_p, uniform(sequence.seed, position))


def _draw(logits: Tensor, draws: list[Draw]) -> Tensor:
    """Draw one token for each row of logits, none of which is greedy."""
    size = logits.shape[-1]
    numbers = [one._replace(top_k=min(one.top_k, size) if one.top_k else size) for one in draws]
    parameters = to_device(np.array(numbers, np.float64), logits.device).split(1, dim=-1)
    if _has_kernels(logits.device):
        from inflight.engine.cuda.draw import draw  # it needs Triton's compiler

        return draw(logits, *parameters)
    return draw_sorted(logits, *parameters)


def draw_sorted(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor
) -> Tensor:
    """Return the tokens drawn, int64 ``[n]``, by sorting the logits; it defines what ``cuda.draw`` must return too.

    Args:
        logits: float32 ``[n, vocab]``.
        temperature: above 0; this and the others are float64 ``[n, 1]``.
        top_k: at least 1, at most the vocabulary.
        top_p: above 0, at most 1.
        min_p: from 0 to 1.
        numbers: in [0, 1), by which each row is drawn.
    """
    size = logits.shape[-1]
    # An infinite bias makes infinite logits; the softmax of these would be NaN.
    finite = logits.clamp(max=torch.finfo(torch.float32).max)
    values, ids = finite.sort(dim=-1, descending=True, stable=True)
    scaled = values.double().div_(temperature)
    scaled.masked_fill_(torch.arange(size, device=logits.device) >= top_k, -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    del scaled
    before = probabilities.cumsum(dim=-1).sub_(probabilities)
    kept = (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    del before
    kept[:, 0] = True
    mass = probabilities.mul_(kept).cumsum(dim=-1)
    index = torch.searchsorted(mass, numbers * mass[:, -1:], right=True).clamp(max=size - 1)
    return ids.gather(-1, index)[:, 0]


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    """Whether a device draws by kernels, which need Triton's compiler and fast float64, which few GPUs have."""
    return device.type == "cuda" and has_compiler() and torch.cuda.get_device_capability(device) in _FLOAT64


def _log_probs(logits: Tensor, tokens: Tensor, settings: abc.Sequence[SamplingParams]) -> _Report | None:
    """Return the log-probs that were asked for: of the sampled tokens, of the likeliest, and of given ones."""
    rows = [row for row, one in enumerate(settings) if one.log_probs or one.top_log_probs or one.log_prob_ids]
    if not rows:
        return None
    index, most = _index(rows, logits), max(settings[row].top_log_probs for row in rows)
    log_probs = logits[index].log_softmax(dim=-1)
    chosen = log_probs.gather(-1, tokens[index].clamp(min=0)[:, None])[:, 0]
    values, ids = log_probs.topk(min(most, log_probs.shape[-1]), dim=-1)
    given = _of_given(log_probs, [settings[row].log_prob_ids for row in rows])

    def fill(
        sampled: list[Sampled], chosen: np.ndarray, values: np.ndarray, ids: np.ndarray, given: np.ndarray | None = None
    ) -> None:
        for row, own, log_probs, likeliest in zip(rows, chosen.tolist(), values.tolist(), ids.tolist(), strict=True):
            sampled[row].log_prob = own
            sampled[row].top = list(zip(likeliest, log_probs, strict=True))[: settings[row].top_log_probs]
        for row, of_ids in zip(rows, given, strict=True) if given is not None else ():
            if count := len(settings[row].log_prob_ids):
                sampled[row].of_ids = of_ids[:count].copy()  # a view would keep all rows

    return _Report([chosen, values, ids, *given], fill)


def _of_given(log_probs: Tensor, ids: list[tuple[int, ...]]) -> list[Tensor]:
    """Return, if any are given, the log-probs ``[n, m]`` of each row's ``ids``; behind a row's own it is padded."""
    width = max(map(len, ids))
    padded = np.array([[*row, *[0] * (width - len(row))] for row in ids], np.int64)
    return [log_probs.gather(-1, to_device(padded, log_probs.device))] if width else []


def _own_logits(logits: Tensor, settings: abc.Sequence[SamplingParams]) -> _Report | None:
    """Return the model's own logits of the rows that asked for them."""
    rows = [row for row, one in enumerate(settings) if one.generation_logits]
    if not rows:
        return None

    def fill(sampled: list[Sampled], logits: np.ndarray) -> None:
        for row, own in zip(rows, logits, strict=True):
            sampled[row].logits = own.copy()  # a view would keep all rows

    return _Report([logits[_index(rows, logits)]], fill)


def _candidates(logits: Tensor, settings: abc.Sequence[SamplingParams]) -> _Report | None:
    """Return the beams' candidates, if there are beams."""
    counts = {row: num_candidates(one) for row, one in enumerate(settings) if one.beam_width > 1}
    if not counts:
        return None
    finite = logits[_index(list(counts), logits)].clamp(max=torch.finfo(torch.float32).max)  # as in _draw
    values, ids = finite.log_softmax(dim=-1).topk(min(max(counts.values()), logits.shape[-1]), dim=-1)

    def fill(sampled: list[Sampled], values: np.ndarray, ids: np.ndarray) -> None:
        for (row, count), log_probs, likeliest in zip(counts.items(), values.tolist(), ids.tolist(), strict=True):
            sampled[row].candidates = list(zip(likeliest, log_probs, strict=True))[:count]

    return _Report([values, ids], fill)
