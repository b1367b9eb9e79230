"""The sampler: a step's logits to tokens, batched; each request by its own seed and parameters.

A token is drawn by the inverse of the distribution function at one number in [0, 1) that depends only on the request's
seed and the position. So a request's tokens do not depend on its neighbours, and a preempted one goes on as it would
have. Order of application: logit bias, bad words and min_tokens, penalties, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inflight.engine.sequence import Sequence
from inflight.sampling import SamplingParams


@dataclass(slots=True)
class Sampled:
    """One sequence's next token, and what was asked about it."""

    token: int
    """-1: the logits are not numbers."""
    log_prob: float = 0.0
    top: list[tuple[int, float]] = field(default_factory=list)
    logits: np.ndarray | None = None


@torch.inference_mode()
def sample(logits: Tensor, sequences: Rows[Sequence]) -> list[Sampled]:
    """Choose one token per row.

    Log-probs and reported logits are the model's own, before any penalty or temperature.

    Args:
        logits: float32 ``[n, vocab]``.
        sequences: the ``n`` sequences.
    """
    adjusted = logits
    touched = [row for row, sequence in enumerate(sequences) if _is_adjusted(sequence)]
    if touched:
        adjusted = logits.clone()
        for row in touched:
            _adjust(adjusted[row], sequences[row])
    tokens = adjusted.argmax(dim=-1)
    drawn = [row for row, sequence in enumerate(sequences) if not sequence.request.sampling.greedy]
    if drawn:
        tokens[drawn] = _draw(adjusted[drawn], [sequences[row] for row in drawn])
    broken = adjusted.amax(dim=-1).isnan().tolist()
    sampled = [Sampled(-1 if nan else token) for token, nan in zip(tokens.tolist(), broken, strict=True)]
    _report(sampled, logits, [sequence.request.sampling for sequence in sequences])
    return sampled


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) of a seed (unsigned, 64 bits) at a position."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53  # all 64 bits would round up to 1


def _is_adjusted(sequence: Sequence) -> bool:
    sampling = sequence.request.sampling
    return bool(
        sampling.logit_bias
        or sampling.bad_sequences
        or sequence.generated < sampling.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _adjust(row: Tensor, sequence: Sequence) -> None:
    """Apply to one row, in place, what depends on the request's own tokens."""
    sampling = sequence.request.sampling
    if sampling.logit_bias:
        row[list(sampling.logit_bias)] += torch.tensor(list(sampling.logit_bias.values()), device=row.device)
    forbidden = [bad[-1] for bad in sampling.bad_sequences if _ends_with(sequence.tokens, bad[:-1])]
    if sequence.generated < sampling.min_tokens and not sampling.ignore_eos:
        # Old clients send end ids of other models; an id that this one lacks ends nothing.
        forbidden += [token for token in sampling.end_ids if 0 <= token < len(row)]
    if forbidden:
        row[forbidden] = -torch.inf
    _penalize(row, sequence.tokens, sampling)


def _ends_with(tokens: list[int], ending: tuple[int, ...]) -> bool:
    return not ending or tuple(tokens[-len(ending) :]) == ending


def _penalize(row: Tensor, tokens: list[int], sampling: SamplingParams) -> None:
    """Repetition (arXiv:1909.05858), presence and frequency penalties; all count the prompt, as upstream does."""
    if sampling.repetition_penalty == 1.0 and not sampling.presence_penalty and not sampling.frequency_penalty:
        return
    seen, counts = torch.tensor(tokens, device=row.device).unique(return_counts=True)
    values = row[seen]
    penalty = sampling.repetition_penalty
    values = torch.where(values > 0, values / penalty, values * penalty)
    row[seen] = values - sampling.presence_penalty - sampling.frequency_penalty * counts


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Draw one token per row of logits that are to be sampled."""
    settings = [sequence.request.sampling for sequence in sequences]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    size = logits.shape[-1]
    temperature = column([one.temperature or 1.0 for one in settings])
    # An infinite bias is as likely as can be; infinity less infinity would be no number.
    finite = logits.double().clamp(max=torch.finfo(torch.float32).max)
    scaled, ids = (finite / temperature).sort(dim=-1, descending=True, stable=True)
    top_k = column([min(one.top_k, size) if one.top_k else size for one in settings])
    scaled = scaled.masked_fill(torch.arange(size, device=logits.device) >= top_k, -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = before < column([one.top_p for one in settings])
    kept &= probabilities >= column([one.min_p for one in settings]) * probabilities[:, :1]
    kept[:, 0] = True
    mass = (probabilities * kept).cumsum(dim=-1)
    numbers = column([uniform(sequence.seed, len(sequence.tokens)) for sequence in sequences])
    places = torch.searchsorted(mass, numbers * mass[:, -1:], right=True).clamp(max=size - 1)
    return ids.gather(-1, places)[:, 0]


def _report(sampled: list[Sampled], logits: Tensor, settings: list[SamplingParams]) -> None:
    """Fill in log-probs and logits where they were asked for."""
    rows = [row for row, one in enumerate(settings) if one.log_probs or one.top_log_probs]
    if rows:
        log_probs = logits[rows].log_softmax(dim=-1)
        most = max(settings[row].top_log_probs for row in rows)
        values, ids = log_probs.topk(min(most, log_probs.shape[-1]), dim=-1)
        for place, row in enumerate(rows):
            one = sampled[row]
            one.log_prob = float(log_probs[place, one.token])
            count = settings[row].top_log_probs
            one.top = list(zip(ids[place, :count].tolist(), values[place, :count].tolist(), strict=True))
    for row, wanted in enumerate(settings):
        if wanted.generation_logits:
            sampled[row].logits = logits[row].cpu().numpy().copy()  # a view would keep all rows
