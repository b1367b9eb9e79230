"""The prefix index: a tree whose nodes are full blocks. The path from the root to a node is a cached prefix.

The tree compares the tokens themselves: there are no hashes that could collide. Siblings are kept in the order of their
tokens, so that both the equal block and the one with the longest common beginning are found by bisection, however many
prompts differ in their first block. The tree keeps each node's ``block_id`` and does not interpret it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import abc
from dataclasses import dataclass, field
from operator import attrgetter

DEFAULT_PRIORITY = 35
"""The retention priority of a block for which no request asks another one; upstream's default."""
_by_tokens = attrgetter("tokens")


@dataclass(slots=True, eq=False)
class Node:
    """One full block and all that comes before it."""

    tokens: tuple[int, ...]
    parent: Node | None
    """None: it is the root, which is no block."""
    block_id: int
    """Where its keys and values are: a block on the device, or an offload block, whose ids follow those."""
    children: list[Node] = field(default_factory=list)
    """The blocks that continue it, in the order of their tokens."""
    children_on_device: int = 0
    """How many of the children are not offloaded."""
    last_used: int = 0
    """The manager's clock when a sequence last gave it back; the clock counts sequences that were freed."""
    uses: int = 1
    """How many sequences have used it."""
    priority: int = DEFAULT_PRIORITY
    """The retention priority: blocks of lower priority are evicted first."""
    expires_ns: int | None = None
    """When the priority becomes the default again; None: never."""
    ticket: int = 0
    """The number of its valid entry in an eviction queue; 0: it is in none."""


class PrefixTree:
    """All cached prefixes."""

    def __init__(self) -> None:
        self.root = Node((), None, -1)

    def child(self, parent: Node, tokens: tuple[int, ...]) -> Node | None:
        """Return the block of exactly these tokens behind ``parent``."""
        children = parent.children
        index = bisect_left(children, tokens, key=_by_tokens)
        if index < len(children) and children[index].tokens == tokens:
            return children[index]
        return None

    def longest_prefix(self, tokens: abc.Sequence[int], block_size: int) -> tuple[list[Node], Node | None, int]:
        """Return the longest cached prefix of ``tokens`` without the last, which must be computed to give logits.

        Returns:
            Its full blocks; then the result of ``longest_common`` for the tokens behind them.
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
        return path, *self.longest_common(last, tuple(tokens[start : min(start + block_size, most)]))

    def longest_common(self, parent: Node, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """Return the child with the longest common beginning with ``tokens``, and its length; (None, 0): there is none.

        Among sorted siblings it is a neighbour of the place where ``tokens`` would be inserted.
        """
        index = bisect_left(parent.children, tokens, key=_by_tokens)
        best, common = None, 0
        for node in parent.children[max(0, index - 1) : index + 1]:
            pairs = enumerate(zip(node.tokens, tokens, strict=False))
            length = next((place for place, (one, other) in pairs if one != other), min(len(node.tokens), len(tokens)))
            if length > common:
                best, common = node, length
        return best, common

    def add(self, parent: Node, tokens: tuple[int, ...], block_id: int) -> Node:
        """Add a block that is not in the tree yet, and return its node."""
        node = Node(tokens, parent, block_id)
        parent.children.insert(bisect_left(parent.children, tokens, key=_by_tokens), node)
        return node

    def remove(self, node: Node) -> None:
        """Remove a block that has no children."""
        assert node.parent is not None
        assert not node.children
        siblings = node.parent.children
        del siblings[bisect_left(siblings, node.tokens, key=_by_tokens)]
