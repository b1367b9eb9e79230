"""Several guesses of what comes next, checked in one step: a tree, in which guesses share the tokens they begin with.

Its nodes are draft tokens in an order in which parents come first; the first guess comes first of all, so that its
tokens lie where they stay if they are right (arXiv:2305.09781).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROOT = -1
"""The parent of a first token: the last token of the sequence."""


def merge(guesses: Iterable[Sequence[int]], most: int) -> tuple[list[int], list[int]]:
    """Return the tree of guesses, the likeliest first: its tokens, and of each the index of its parent.

    Args:
        guesses: tokens that may come next, each in their order.
        most: nodes; what does not fit is left out.
    """
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for guess in guesses:
        node = ROOT
        for token in guess:
            if (node, token) not in known:
                if len(tokens) == most:
                    break
                known[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = known[node, token]
    return tokens, parents


def child(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
    """Return the node behind ``node`` that is ``token``, or None."""
    both = enumerate(zip(parents, tokens, strict=True))
    return next((index for index, found in both if found == (node, token)), None)


def walk(tokens: Sequence[int], parents: Sequence[int], made: Iterable[int]) -> list[int]:
    """Return the nodes that are the first of the tokens ``made``, from the root on."""
    path: list[int] = []
    node: int | None = ROOT
    for token in made:
        node = child(tokens, parents, ROOT if node is None else node, token)
        if node is None:
            break
        path.append(node)
    return path


def ancestry(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root to ``node``, itself included."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]
