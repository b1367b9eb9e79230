"""The prefix index: a tree of blocks. A node is a block's tokens behind its parent's: equal paths are equal prefixes.

It compares tokens themselves: there are no hashes that could collide. Siblings lie in the order of their tokens, so
that both the equal block and the one that begins alike longest are found by bisection, however many prompts differ in
their first block. It knows where the contents lie (``place``) and not what that means.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from inflight.engine.kv.retention import DEFAULT_PRIORITY

_by_tokens = attrgetter("tokens")


@dataclass(slots=True, eq=False)
class Node:
    """One full block and all that comes before it."""

    tokens: tuple[int, ...]
    parent: Node | None
    """None: it is the root, which is no block."""
    place: int
    """Where its keys and values are."""
    children: list[Node] = field(default_factory=list)
    """In the order of their tokens."""
    resident: int = 0
    """How many of them have a block."""
    last_used: int = 0
    """When a sequence last gave it back, in sequences closed."""
    uses: int = 1
    """Sequences that have held it."""
    priority: int = DEFAULT_PRIORITY
    """Of retention."""
    expires_ns: int | None = None
    """When the priority is the default one again; None: never."""
    ticket: int = 0
    """Of its entry in an eviction queue; 0: it has none."""


class PrefixTree:
    """All prefixes that are known."""

    def __init__(self) -> None:
        self.root = Node((), None, -1)

    def child(self, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        """Return the block of exactly these tokens behind ``parent``."""
        children = parent.children
        index = bisect_left(children, tokens, key=_by_tokens)
        if index < len(children) and children[index].tokens == tokens:
            return children[index]
        return None

    def match(self, tokens: Sequence[int], block_size: int) -> tuple[list[Node], Node | None, int]:
        """Return the longest known prefix that leaves one token over: that one must be computed to give logits.

        Returns:
            Its full blocks; and the block behind them that begins most alike, with how many tokens, as ``most_alike``.
        """
        path: list[Node] = []
        last, most = self.root, len(tokens) - 1
        for start in range(0, most // block_size * block_size, block_size):
            node = self.child(last, tuple(tokens[start : start + block_size]))
            if node is None:
                break
            path.append(node)
            last = node
        start = len(path) * block_size
        return path, *self.most_alike(last, tuple(tokens[start : min(start + block_size, most)]))

    def most_alike(self, parent: Node, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """Return the block behind ``parent`` that begins with most of ``tokens``, and with how many; (None, 0): none.

        In a sorted list it is a neighbour of the place where ``tokens`` would be put.
        """
        index = bisect_left(parent.children, tokens, key=_by_tokens)
        best, common = None, 0
        for node in parent.children[max(0, index - 1) : index + 1]:
            length = _common_prefix(node.tokens, tokens)
            if length > common:
                best, common = node, length
        return best, common

    def add(self, parent: Node, tokens: tuple[int, ...], place: int) -> Node:
        """Enter a block that is not known yet."""
        node = Node(tokens, parent, place)
        parent.children.insert(bisect_left(parent.children, tokens, key=_by_tokens), node)
        return node

    def remove(self, node: Node) -> None:
        """Forget a block without children."""
        assert node.parent is not None
        assert not node.children
        siblings = node.parent.children
        del siblings[bisect_left(siblings, node.tokens, key=_by_tokens)]


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    length, limit = 0, min(len(first), len(second))
    while length < limit and first[length] == second[length]:
        length += 1
    return length
