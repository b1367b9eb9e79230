"""Verification: it finds the drafts of a step that equal the tokens that the target samples.

Several guesses of what comes next are verified in one step as a tree, in which guesses share the tokens that they begin
with (arXiv:2305.09781). Its nodes are draft tokens, in an order in which parents come first; the first guess comes
first of all, so that the keys and values of its tokens need not be moved if they are accepted.

A drafted position is sampled as every other is: from the target's own distribution, with all that the request asks for,
at the one random number that seed and position give. A draft is accepted if it equals that token, and so are all drafts
before it. So the tokens are those of a run without speculation, greedy or sampled, and so is their distribution.

Rejection sampling (arXiv:2211.17192, arXiv:2302.01318) accepts a draft more often, up to one minus the total variation
of both distributions, but then tokens depend on the drafts: on the draft model, on its rounding, on the batch. What is
lost is won back in part by drafting with the same number: two distributions that are alike, each drawn by inverse
transform at one number, mostly give the same token (coupling by common random numbers, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from inflight.engine.chunk import Chunk
from inflight.engine.sequence import Continuation, Sampled, SamplingRow

ROOT = -1
"""The parent of a first token: the last token of the sequence."""


def sampling_rows(chunks: Iterable[Chunk]) -> list[SamplingRow]:
    """Return the rows of a step's logits: of each chunk that samples, its sequence, then one for each draft."""
    rows: list[SamplingRow] = []
    for chunk in chunks:
        if chunk.samples:
            paths = (ancestry(chunk.parents, node) for node in range(len(chunk.drafts)))
            accepted = (tuple(chunk.drafts[node] for node in path) for path in paths)
            rows += [chunk.sequence, *(Continuation(chunk.sequence, drafts) for drafts in accepted)]
    return rows


def accepted_and_bonus_tokens(chunks: Iterable[Chunk], sampled: list[Sampled]) -> list[list[Sampled]]:
    """Return, for each chunk, its accepted drafts and the bonus token behind them; none for a chunk that samples none.

    ``sampled`` has one token for each of ``sampling_rows(chunks)``.
    """
    rows = iter(sampled)
    return [_follow(chunk, list(islice(rows, len(chunk.drafts) + 1))) if chunk.samples else [] for chunk in chunks]


def _follow(chunk: Chunk, sampled: list[Sampled]) -> list[Sampled]:
    """Return the tokens on the path through a chunk's drafts that its own samples take."""
    made, node = [sampled[0]], ROOT
    while (following := _child(chunk.drafts, chunk.parents, node, made[-1].token)) is not None:
        node = following
        made.append(sampled[node + 1])
    return made


def merge(guesses: Iterable[Iterable[int]], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tree of guesses, of which the likeliest comes first: its tokens, and the index of each one's parent.

    It has ``most`` nodes at most: tokens that do not fit are left out.
    """
    nodes: dict[tuple[int, int], int] = {}
    for guess in guesses:
        node = ROOT
        for token in guess:
            if (node, token) not in nodes and len(nodes) == most:
                break
            node = nodes.setdefault((node, token), len(nodes))
    return tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes)


def walk(tokens: tuple[int, ...], parents: tuple[int, ...], made: Iterable[int]) -> list[int]:
    """Return the path from the root whose nodes equal the first of the tokens ``made``: the accepted drafts."""
    path = [ROOT]
    for token in made:
        node = _child(tokens, parents, path[-1], token)
        if node is None:
            break
        path.append(node)
    return path[1:]


def ancestry(parents: tuple[int, ...], node: int) -> list[int]:
    """Return the nodes from the root to ``node``, itself included."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _child(tokens: tuple[int, ...], parents: tuple[int, ...], node: int, token: int) -> int | None:
    """Return the node behind ``node`` that is ``token``, or None."""
    both = enumerate(zip(parents, tokens, strict=True))
    return next((index for index, found in both if found == (node, token)), None)
