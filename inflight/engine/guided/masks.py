"""Masks: they keep the tokens that guides forbid from being sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inflight.engine.guided.state import GuideState
from inflight.engine.guided.vocabulary import WORD
from inflight.engine.transfer import to_device


def mask_logits(logits: Tensor, guides: Sequence[GuideState | None]) -> None:
    """Set the logits of all tokens that its guide forbids to minus infinity, in place.

    Args:
        logits: float32 ``[n, vocab]``.
        guides: the guide of each row at its position; None: the row has none.
    """
    rows = [row for row, guide in enumerate(guides) if guide is not None]
    masks = next_masks([guide for guide in guides if guide is not None])
    if logits.device.type == "cpu":
        values, bits = logits.numpy(), (~masks).view(np.uint8)
        for mask, row in zip(bits, rows, strict=True):  # so little work that threads would take longer to begin it
            forbidden = np.unpackbits(mask, count=values.shape[1], bitorder="little").view(np.bool_)
            np.copyto(values[row], -np.inf, where=forbidden)
        return
    index = to_device(np.array(rows, np.int64), logits.device)
    forbidden = forbidden_tokens(to_device(masks, logits.device), logits.shape[1])
    logits[index] = logits[index].masked_fill(forbidden, -torch.inf)


def forbidden_tokens(words: Tensor, vocab_size: int) -> Tensor:
    """Return, for masks ``[n, words]`` on a device, which tokens they forbid: bool ``[n, vocab_size]``."""
    bits = words[:, :, None] >> torch.arange(WORD, dtype=torch.int32, device=words.device)
    return (bits & 1 == 0).flatten(1)[:, :vocab_size]


def next_masks(guides: Sequence[GuideState]) -> np.ndarray:
    """Return what each guide allows next: int32 ``[n, words]``, a bit for each token, the lowest bit first.

    ``guides``: at least one; all of one vocabulary.
    """
    vocabulary = guides[0].vocabulary
    masks = np.tile(vocabulary.everything(), (len(guides), 1))
    held = [(place, guide, guide.matcher) for place, guide in enumerate(guides) if guide.matcher is not None]
    if held:
        made, seconds = vocabulary.masks([matcher for *_, matcher in held])
        masks[[place for place, *_ in held]] = made
        for (_, guide, _), taken in zip(held, seconds, strict=True):
            guide.charge(taken)
    for mask, guide in zip(masks, guides, strict=True):
        guide.complete_mask(mask)
    return masks
