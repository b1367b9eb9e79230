"""Heads of attention that are shown where to look, while the demo model learns to copy into calls and JSON.

Names and numbers are copied from definitions and questions. The circuit for it is a head that looks at the token before
and a head that looks for what followed a token earlier (induction heads, arXiv:2209.11895). It comes late by itself, as
each half is useless without the other. So one head each is also trained on where to look, by the cross-entropy of its
attention (supervised attention, arXiv:1608.00112), and one more finds a word of the answer in the prompt, where it is
another token if a space is before it. The result is a plain Llama: only training knows these heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from demo.llama import Attention, Llama, rotary_tables, rotate
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

BEFORE, FOLLOWED, WORD = HEADS = ((0, 3), (2, 3), (2, 1))
"""Layer and head of each of the three."""
MOST_PLACES = 8
"""A token that is in more places than these is known, not copied."""


class Copying:
    """The loss of the three heads; it sees what goes into their layers while the model runs."""

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        self._layers = {layer: model.layers[layer].self_attn for layer, _ in HEADS}
        self._words = words_of(tokenizer)
        self._inputs: dict[int, Tensor] = {}
        for layer, attention in self._layers.items():
            attention.register_forward_pre_hook(lambda _, args, at=layer: self._inputs.update({at: args[0]}))

    def loss(self, ids: Tensor, trained: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return which next tokens are words of the prompt [batch, length - 1], and the loss of the heads.

        It is for the batch that the model has just run: `ids` is [batch, length] and `mask` [batch, 1, length, length],
        as the model has them; `trained` [batch, length - 1] is True where the next token is trained.
        """
        seen = mask[:, 0, :-1, :-1]
        right = places(ids, trained, seen, self._words)
        return right[WORD].any(-1), torch.stack(list(self._losses(right, seen))).sum()

    def _losses(self, places: dict[tuple[int, int], Tensor], seen: Tensor) -> Iterator[Tensor]:
        """Yield for each head the mean of -log(its attention to the right places)."""
        for (layer, head), right in places.items():
            count = right.sum(-1)
            chosen = (count > 0) & (count <= MOST_PLACES)
            scores = head_scores(self._layers[layer], self._inputs[layer][:, :-1].float(), head)
            scores, right = scores.masked_fill(~seen, -torch.inf)[chosen], right[chosen]
            lost = scores.logsumexp(-1) - scores.masked_fill(~right, -torch.inf).logsumexp(-1)
            yield lost.sum() / max(1, len(lost))


def places(ids: Tensor, trained: Tensor, seen: Tensor, words: Tensor) -> dict[tuple[int, int], Tensor]:
    """Return where each head should look, [batch, length - 1, length - 1], for the arguments of `Copying.loss`.

    `seen` is the mask of all tokens but the last; `words` are those of `words_of`.
    """
    now, after = ids[:, :-1], ids[:, 1:, None]
    earlier = F.pad(now, (1, 0))[:, None, :-1]
    wanted = seen & trained[..., None]
    before = torch.ones(now.shape[1] - 1, dtype=torch.bool).diag(-1)
    return {
        BEFORE: seen & before,
        FOLLOWED: wanted & (after == now[:, None]) & (now[:, :, None] == earlier),
        WORD: wanted & (words[after] == words[now][:, None]) & (words[after] >= 0),
    }


def head_scores(attention: Attention, x: Tensor, head: int) -> Tensor:
    """Return one head's attention [batch, length, length] before the softmax for an input x [batch, length, hidden]."""
    size = attention.config.head_dim
    shared = head * attention.config.num_key_value_heads // attention.config.num_attention_heads
    rope = rotary_tables(attention.config, x.shape[1])
    q = rotate(F.linear(x, attention.q_proj.weight.unflatten(0, (-1, size))[head]), *rope)
    k = rotate(F.linear(x, attention.k_proj.weight.unflatten(0, (-1, size))[shared]), *rope)
    return q @ k.transpose(1, 2) / math.sqrt(size)


def words_of(tokenizer: Tokenizer) -> Tensor:
    """Return a number per token [vocab]: the same for a word with and without a space or capital, -1 for no word."""
    texts = [tokenizer.decode([token]).strip().lower() for token in range(tokenizer.get_vocab_size())]
    numbers = {text: number for number, text in enumerate(texts) if text.isalnum()}
    return torch.tensor([numbers.get(text, -1) for text in texts])
