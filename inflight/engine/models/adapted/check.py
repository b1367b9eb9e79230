"""A model of transformers is compared with itself at the start, before it serves.

Alone, with its own attention and masks, it computes two short texts; then the engine's way is taken, in which both are
one packed batch, in two steps, over a KV cache. Whatever the dry run could not see, a state that it carries from token
to token, a bias that depends on distances, a count of its own, shows here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inflight.engine.attention.torch_backend import QueryRange, TorchAttention
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.models.adapted import attention
from inflight.engine.models.adapted.model import AdaptedModel
from inflight.errors import DeploymentError

_LENGTHS, _FIRST = (29, 17), (11, 5)
"""Tokens of the two texts, and how many of them are in the first step."""
_BLOCK = 16
_BLOCKS = [-(-length // _BLOCK) for length in _LENGTHS]
_TOLERANCE, _ROUNDED = 1e-3, 0.1
"""Of hidden states, relative: in float32, and where weights, keys and values are of a type that rounds more."""
_SHARE = 0.9
"""Of the tokens that must be within: rounding may choose another expert for a few."""


@torch.inference_mode()
def check(model: AdaptedModel, make_pool: Callable[[int, int], KvPool]) -> None:
    """Compare a loaded model's two ways.

    Args:
        model: with its weights, as it will serve.
        make_pool: returns memory for keys and values, of so many blocks of so many tokens.

    Raises:
        DeploymentError: they differ.
    """
    name, device = model.config.architecture, model.device
    seeded = torch.Generator().manual_seed(7)
    longest = model.config.max_position_embeddings
    lengths = [min(length, longest) for length in _LENGTHS]
    texts = [torch.randint(model.config.vocab_size, (length,), generator=seeded).to(device) for length in lengths]
    try:
        alone = [_alone(model, text) for text in texts]
        pool = make_pool(sum(_BLOCKS), _BLOCK)
        packed = _packed(model, pool, texts)
    except (DeploymentError, torch.OutOfMemoryError):
        raise  # whoever divides the memory knows what to say of it
    except Exception as error:  # of whatever kind: the code is not ours
        line = " ".join(str(error).split())[:200]
        raise DeploymentError(f"{name}: transformers' code fails here: {type(error).__name__}: {line}") from None
    errors = torch.cat([_difference(*pair) for pair in zip(packed, alone, strict=True)])
    tolerance = _TOLERANCE if model.dtype == pool.stored == torch.float32 else _ROUNDED
    if not (errors < tolerance).float().mean() >= _SHARE:
        raise DeploymentError(
            f"{name}: the engine's hidden states differ from those of transformers' code alone by "
            f"{errors.median():.1e} (at most {tolerance:g} is allowed): this model is not supported"
        )


def _alone(model: AdaptedModel, text: Tensor) -> Tensor:
    attention.use(model, "eager")
    try:
        return model.hidden(input_ids=text[None])  # without positions, which the model then counts itself
    finally:
        attention.use(model, attention.SERVING)


def _packed(model: AdaptedModel, pool: KvPool, texts: list[Tensor]) -> list[Tensor]:
    """Return hidden states of each text."""
    tables = [list(range(sum(_BLOCKS[:index]), sum(_BLOCKS[: index + 1]))) for index in range(len(_BLOCKS))]
    parts: list[list[Tensor]] = [[] for _ in texts]
    ends = [(min(first, len(text) - 1), len(text)) for first, text in zip(_FIRST, texts, strict=True)]
    for step in (0, 1):
        spans = [(0, first) if step == 0 else (first, length) for first, length in ends]
        ranges, first = [], 0
        for (begin, end), table in zip(spans, tables, strict=True):
            ranges.append(QueryRange(first, begin, end - begin, table))
            first += end - begin
        attend = TorchAttention(pool, ranges, _BLOCK)
        tokens = torch.cat([text[slice(*span)] for text, span in zip(texts, spans, strict=True)])
        hidden = model(tokens, attend.positions, attend)
        for own, one in zip(parts, ranges, strict=True):
            own.append(hidden[one.first : one.stop])
    return [torch.cat(own) for own in parts]


def _difference(made: Tensor, expected: Tensor) -> Tensor:
    """Return the relative error of each token."""
    return ((made.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp(min=1e-6)).cpu()
