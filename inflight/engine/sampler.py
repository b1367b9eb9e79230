"""The sampler: a step's logits to tokens, batched; each request by its own seed and parameters.

A token is drawn by the inverse of the distribution function at one number in [0, 1) that depends only on the request's
seed and the position. So a request's tokens do not depend on its neighbours, and a preempted one goes on as it would
have. Order of application: logit bias, bad words and min_tokens, penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from inflight.engine.beam import num_candidates
from inflight.engine.cuda.compiler import has_compiler
from inflight.engine.request import Request
from inflight.engine.transfer import ToHost, to_device
from inflight.engine.validation import every_token_is_banned
from inflight.errors import EngineFailure, InflightError
from inflight.sampling import SamplingParams

_NOT_NUMBERS, _ALL_BANNED = -1, -2
"""In place of a token, where there is none."""
_FLOAT64 = {(8, 0), (9, 0), (10, 0)}
"""Compute capabilities of GPUs that have a unit for float64 for every two or four of float32, and not for every 64."""


class Row(Protocol):
    """What one row of logits is sampled for: a sequence, or what one would be with some tokens more."""

    @property
    def request(self) -> Request:
        """What was asked for."""

    @property
    def seed(self) -> int:
        """Of the random numbers, unsigned, 64 bits."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens before this position."""

    @property
    def generated(self) -> int:
        """How many of them were generated."""


@dataclass(slots=True)
class Sampled:
    """One sequence's next token, and what was asked about it."""

    token: int
    """Below 0: there is none; ``no_token`` says why."""
    log_prob: float = 0.0
    top: list[tuple[int, float]] = field(default_factory=list)
    logits: np.ndarray | None = None
    candidates: list[tuple[int, float]] = field(default_factory=list)
    """Of a beam: the likeliest tokens with their log-probs, best first, penalties and bans applied."""


class Choice:
    """A step's tokens, chosen by the device, which may still be at it."""

    def __init__(self, tokens: Tensor, reports: Rows[_Report]) -> None:
        """
        Args:
            tokens: int64 ``[n]``; below 0: there is none.
            reports: what was asked about them.
        """
        self.tokens = tokens
        self._reports = reports
        self._kept: list[int] | None = None
        self._parts = ToHost([tokens, *(tensor for report in reports for tensor in report.tensors)])

    def of(self, rows: list[int]) -> Tensor:
        """Return the tokens of some rows, on the device."""
        return self.tokens if rows == list(range(len(self.tokens))) else self.tokens[_places(rows, self.tokens)]

    def keep(self, rows: list[int]) -> None:
        """Forget all rows but these."""
        self.tokens, self._kept = self.of(rows), rows

    def wait(self) -> list[Sampled]:
        """Return what was sampled for each row, once it is there."""
        tokens, *parts = self._parts.wait()
        sampled = [Sampled(token) for token in tokens.tolist()]
        for report in self._reports:
            count = len(report.tensors)
            report.fill(sampled, *parts[:count])
            parts = parts[count:]
        return sampled if self._kept is None else [sampled[row] for row in self._kept]


class _Report(NamedTuple):
    """What was asked about a step's tokens."""

    tensors: list[Tensor]
    fill: Callable[..., None]
    """Puts it into ``list[Sampled]``, given the tensors as arrays."""


def sample(logits: Tensor, sequences: Rows[Row]) -> list[Sampled]:
    """Choose one token per row, and wait for it; see ``choose``."""
    return choose(logits, sequences).wait()


@torch.inference_mode()
def choose(logits: Tensor, sequences: Rows[Row]) -> Choice:
    """Have the device choose one token per row.

    Log-probs and reported logits are the model's own, before any penalty or temperature.

    Args:
        logits: float32 ``[n, vocab]``.
        sequences: what the ``n`` rows are sampled for.
    """
    adjusted, settings = logits, [sequence.request.sampling for sequence in sequences]
    touched = [row for row, sequence in enumerate(sequences) if _is_adjusted(sequence)]
    if touched:
        adjusted = logits.clone()
        for row in touched:
            _adjust(adjusted[row], sequences[row])
    tokens = _likeliest_of_each(adjusted)
    largest = adjusted.gather(-1, tokens[:, None])[:, 0]  # what is no number counts as such
    drawn = [row for row, one in enumerate(settings) if not one.greedy]
    if drawn:
        places = _places(drawn, logits)
        tokens[places] = _draw(adjusted[places], [sequences[row] for row in drawn])
    tokens = tokens.masked_fill(largest == -torch.inf, _ALL_BANNED).masked_fill(largest.isnan(), _NOT_NUMBERS)
    reports = (_log_probs(logits, tokens, settings), _own_logits(logits, settings), _candidates(adjusted, settings))
    return Choice(tokens, [report for report in reports if report is not None])


def no_token(token: int) -> InflightError:
    """Return the error that a sequence ends with for which no token was sampled; ``token`` is below 0."""
    return every_token_is_banned() if token == _ALL_BANNED else EngineFailure("the model's logits are not numbers")


def needs_tokens(sampling: SamplingParams) -> bool:
    """Whether a token is chosen by the tokens before it, not only by the logits."""
    return bool(sampling.bad_sequences or _penalizes(sampling))


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) of a seed (unsigned, 64 bits) at a position."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53  # all 64 bits would round up to 1


def _likeliest_of_each(rows: Tensor) -> Tensor:
    """Return the place of each row's largest value, the first of equal ones: numpy's search is ten times as fast."""
    if rows.device.type == "cpu":
        return torch.from_numpy(rows.numpy().argmax(-1))
    return rows.argmax(dim=-1)


def _is_adjusted(sequence: Row) -> bool:
    sampling = sequence.request.sampling
    return bool(
        sampling.logit_bias
        or sampling.bad_sequences
        or sequence.generated < sampling.min_tokens
        or _penalizes(sampling)
    )


def _penalizes(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def _places(rows: list[int], like: Tensor) -> Tensor:
    """Return an index, on the device of ``like``: a list as an index would be waited for."""
    return to_device(np.array(rows, np.int64), like.device)


def _adjust(row: Tensor, sequence: Row) -> None:
    """Apply to one row, in place, what depends on the request's own tokens."""
    sampling = sequence.request.sampling
    if sampling.logit_bias:
        tokens, values = (to_device(part, row.device) for part in sampling.bias_arrays)
        row[tokens] += values.to(row.dtype)
    forbidden = _forbidden(sampling, sequence.tokens) if sampling.bad_sequences else []
    if sequence.generated < sampling.min_tokens and not sampling.ignore_eos:
        # Old clients send end ids of other models; an id that this one lacks ends nothing.
        forbidden += [token for token in sampling.end_ids if 0 <= token < len(row)]
    if forbidden:
        row.index_fill_(0, _places(forbidden, row), -torch.inf)
    _penalize(row, sequence.tokens, sampling)


def _forbidden(sampling: SamplingParams, tokens: list[int]) -> list[int]:
    """Return the tokens that would complete a bad sequence."""
    bad = sampling.bad_sequences_by_previous
    return [one[-1] for key in (None, tokens[-1]) for one in bad.get(key, ()) if _ends_with(tokens, one[:-1])]


def _ends_with(tokens: list[int], ending: tuple[int, ...]) -> bool:
    return not ending or tuple(tokens[-len(ending) :]) == ending


def _penalize(row: Tensor, tokens: list[int], sampling: SamplingParams) -> None:
    """Repetition (arXiv:1909.05858), presence and frequency penalties; all count the prompt, as upstream does."""
    if not _penalizes(sampling):
        return
    seen, counts = (to_device(part, row.device) for part in np.unique(tokens, return_counts=True))
    values = row[seen]
    penalty = sampling.repetition_penalty
    values = torch.where(values > 0, values / penalty, values * penalty)
    row[seen] = values - sampling.presence_penalty - sampling.frequency_penalty * counts


def _draw(logits: Tensor, sequences: list[Row]) -> Tensor:
    """Draw one token per row of logits that are to be sampled."""
    size = logits.shape[-1]
    table = np.array([_numbers_of(sequence, size) for sequence in sequences], np.float64)
    draw_by = _draw_unsorted() if _has_kernels(logits.device) else draw_sorted
    return draw_by(logits, *to_device(table, logits.device).split(1, dim=-1))


def draw_sorted(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor
) -> Tensor:
    """Return the tokens drawn, int64 ``[n]``, by sorting the logits: the definition, whatever else draws.

    Args:
        logits: float32 ``[n, vocab]``.
        temperature: above 0; this and the others are float64 ``[n, 1]``.
        top_k: at least 1, at most the vocabulary.
        top_p: above 0, at most 1.
        min_p: from 0 to 1.
        numbers: in [0, 1), what each row is drawn by.
    """
    size = logits.shape[-1]
    # An infinite bias is as likely as can be; infinity less infinity would be no number.
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
    places = torch.searchsorted(mass, numbers * mass[:, -1:], right=True).clamp(max=size - 1)
    return ids.gather(-1, places)[:, 0]


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    """Whether a device draws by kernels: it needs Triton's compiler, and units for float64, which few cards have."""
    if device.type != "cuda" or not has_compiler():
        return False
    return torch.cuda.get_device_capability(device) in _FLOAT64


def _draw_unsorted() -> Callable[..., Tensor]:
    from inflight.engine.cuda.draw import draw

    return draw


def _numbers_of(sequence: Row, size: int) -> tuple[float, ...]:
    """Return what a token is drawn by: temperature, top-k, top-p, min-p, and the number in [0, 1)."""
    one, position = sequence.request.sampling, len(sequence.request.prompt) + sequence.generated
    top_k = min(one.top_k, size) if one.top_k else size
    return one.temperature or 1.0, top_k, one.top_p, one.min_p, uniform(sequence.seed, position)


def _log_probs(logits: Tensor, tokens: Tensor, settings: Rows[SamplingParams]) -> _Report | None:
    """Return the log-probs that were asked for, of the tokens chosen and of the likeliest."""
    rows = [row for row, one in enumerate(settings) if one.log_probs or one.top_log_probs]
    if not rows:
        return None
    places, most = _places(rows, logits), max(settings[row].top_log_probs for row in rows)
    log_probs = logits[places].log_softmax(dim=-1)
    chosen = log_probs.gather(-1, tokens[places].clamp(min=0)[:, None])[:, 0]
    values, ids = log_probs.topk(min(most, log_probs.shape[-1]), dim=-1)

    def fill(sampled: list[Sampled], chosen: np.ndarray, values: np.ndarray, ids: np.ndarray) -> None:
        for row, own, log_probs, likeliest in zip(rows, chosen.tolist(), values.tolist(), ids.tolist(), strict=True):
            sampled[row].log_prob = own
            sampled[row].top = list(zip(likeliest, log_probs, strict=True))[: settings[row].top_log_probs]

    return _Report([chosen, values, ids], fill)


def _own_logits(logits: Tensor, settings: Rows[SamplingParams]) -> _Report | None:
    """Return the logits that were asked for."""
    rows = [row for row, one in enumerate(settings) if one.generation_logits]
    if not rows:
        return None

    def fill(sampled: list[Sampled], logits: np.ndarray) -> None:
        for row, own in zip(rows, logits, strict=True):
            sampled[row].logits = own.copy()  # a view would keep all rows

    return _Report([logits[_places(rows, logits)]], fill)


def _candidates(logits: Tensor, settings: Rows[SamplingParams]) -> _Report | None:
    """Return what beams can go on with."""
    counts = {row: num_candidates(one) for row, one in enumerate(settings) if one.beam_width > 1}
    if not counts:
        return None
    finite = logits[_places(list(counts), logits)].clamp(max=torch.finfo(torch.float32).max)  # as in _draw
    values, ids = finite.log_softmax(dim=-1).topk(min(max(counts.values()), logits.shape[-1]), dim=-1)

    def fill(sampled: list[Sampled], values: np.ndarray, ids: np.ndarray) -> None:
        for (row, count), log_probs, likeliest in zip(counts.items(), values.tolist(), ids.tolist(), strict=True):
            sampled[row].candidates = list(zip(likeliest, log_probs, strict=True))[:count]

    return _Report([values, ids], fill)
