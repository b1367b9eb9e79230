"""What a request asks of its prompt's positions, chunk by chunk: their logits, log-probs, or an embedding of them.

No more than ``CONTEXT_ROWS`` rows of logits exist at a time, unless the request asks for the logits themselves. A part
is what one step makes of a chunk; a record joins the parts of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from inflight.engine.request import Output, PromptScores, Request
from inflight.engine.transfer import ToHost, to_device
from inflight.errors import EngineFailure

CONTEXT_ROWS = 256
"""Rows of logits of a prompt that exist at once: a whole prompt's could take more memory than its KV cache."""
_SOFTMAX_ROWS = 32
"""Rows whose log-softmax exists beside their logits."""


class StepStates(Protocol):
    """A step that is computed, whose tokens' logits and hidden states can be had until the next one."""

    def logits(self, rows: Sequence[int]) -> Tensor:
        """Return float32 ``[rows, vocab]`` of some of the step's tokens."""

    def hidden(self, rows: Sequence[int]) -> Tensor:
        """Return the hidden states ``[rows, hidden]`` of some of its tokens, behind the last norm, as a copy."""


class PromptPart(NamedTuple):
    """What a step makes of one chunk of a prompt; None: the request does not ask for it."""

    logits: Tensor | None = None
    """On the host, float32 ``[n, vocab]`` of the chunk's ``n`` tokens of the prompt."""
    scores: ToHost | None = None
    """As ``PromptScores`` has them, of the chunk's tokens that others of the prompt follow."""
    hidden: Tensor | None = None
    """On the device, ``[m, hidden]``: of the ``m`` tokens that the embedding is made of."""


def prompt_part(request: Request, start: int, rows: range, states: StepStates) -> PromptPart:
    """Return what a request asks of a part of its prompt, whose tokens from ``start`` on are ``rows`` of the step."""
    sampling = request.sampling
    logits = _logits(rows, states) if sampling.context_logits else None
    scores = None if sampling.prompt_log_probs is None else _scores(request, start, rows, states)
    if sampling.pooling == "last":
        rows = rows[-1:] if start + len(rows) == len(request.prompt) else rows[:0]
    hidden = states.hidden(rows) if sampling.pooling and rows else None
    return PromptPart(logits, scores, hidden)


def _logits(rows: range, states: StepStates) -> Tensor:
    """Return the logits of ``rows`` on the host."""
    kept: Tensor | None = None
    for at in range(0, len(rows), CONTEXT_ROWS):
        block = states.logits(rows[at : at + CONTEXT_ROWS])
        if kept is None:
            kept = torch.empty(len(rows), block.shape[1])
        kept[at : at + len(block)] = block
        del block  # before the next one is made
    assert kept is not None
    return kept


def _scores(request: Request, start: int, rows: range, states: StepStates) -> ToHost:
    """Return the log-probs of the tokens that follow those of ``rows``, which begin at ``start`` of the prompt.

    The values are those of log-softmax itself, so that a token's own equals its value among the likeliest. The last
    token of the prompt takes part in the product, as it does for context logits, and is left out behind it.
    """
    targets = np.array(request.prompt[start + 1 : start + 1 + len(rows)], np.int64)
    most, parts = request.sampling.prompt_log_probs or 0, list[tuple[Tensor, Tensor, Tensor]]()
    for at in range(0, len(rows), CONTEXT_ROWS):
        end = at + CONTEXT_ROWS
        parts += _score_block(states.logits(rows[at:end]), targets[at:end], most)
    return ToHost([torch.cat(column) for column in zip(*parts, strict=True)])


def _score_block(logits: Tensor, targets: np.ndarray, most: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the scores of the first rows of ``logits``, some at a time: as many as there are targets."""
    # Memory that is taken and given back for each few rows would scatter over the heap.
    room = torch.empty(_SOFTMAX_ROWS, logits.shape[1], device=logits.device)
    tokens = to_device(targets, logits.device)
    parts = zip(logits[: len(tokens)].split(_SOFTMAX_ROWS), tokens.split(_SOFTMAX_ROWS), strict=True)
    return [_score(some, own, most, room[: len(own)]) for some, own in parts]


def _score(logits: Tensor, targets: Tensor, most: int, room: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-prob ``[n]`` of each row's target, and the ``most`` likeliest tokens and log-probs ``[n, k]``.

    ``room``: like ``logits``, for what is needed meanwhile.
    """
    log_probs = torch.log_softmax(logits, dim=-1, out=room)
    values, ids = log_probs.topk(min(most, log_probs.shape[-1]), dim=-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], ids.int(), values


@dataclass(slots=True)
class PromptRecord:
    """The parts of one sequence's prompt so far, until an output takes them."""

    _logits: list[np.ndarray] = field(default_factory=list)
    _scores: list[list[np.ndarray]] = field(default_factory=list)
    _total: Tensor | None = None
    """float64 ``[hidden]``, on the device: the sum of the hidden states so far."""
    _rows: int = 0
    """How many they are."""

    def add(self, part: PromptPart) -> None:
        """Add the next part."""
        if part.logits is not None:
            self._logits.append(part.logits.numpy())
        if part.scores is not None:
            self._scores.append(part.scores.wait())
        if part.hidden is not None:
            self._rows += len(part.hidden)
            for rows in part.hidden.split(CONTEXT_ROWS):
                self._total = _add_rows(self._total, rows)

    def clear(self) -> None:
        """Forget the parts: they will be computed again."""
        self._logits.clear()
        self._scores.clear()
        self._total, self._rows = None, 0

    def fill(self, output: Output) -> None:
        """Give what there is to an output, and forget it."""
        if self._logits:
            output.context_logits = np.concatenate(self._logits)
        if self._scores:
            output.prompt_scores = PromptScores(*map(np.concatenate, zip(*self._scores, strict=True)))
        if self._total is not None:
            output.embedding = (self._total / self._rows).float().cpu().numpy()
            if not np.isfinite(output.embedding).all():
                output.embedding, output.finish_reason = None, None
                output.error = EngineFailure("the model's hidden states are not numbers")
        self.clear()


def _add_rows(total: Tensor | None, rows: Tensor) -> Tensor:
    """Return a float64 sum ``[hidden]`` with ``rows [n, hidden]`` added to it.

    A CPU adds one row after the other, so that the sum does not depend on how a prompt is cut into chunks.
    """
    addends = rows.double() if total is None else torch.cat([total[None], rows.double()])
    return addends.cumsum(0)[-1]
