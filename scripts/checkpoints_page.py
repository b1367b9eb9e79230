"""The page about what a checkpoint says more than once, from the table that readers of checkpoints go by."""

from __future__ import annotations

from inflight.precedence import FACTS

_HEAD = """\
# What counts where a checkpoint says it twice

Written from `inflight/precedence.py` by `make contract`; a test holds them equal.

A checkpoint says many things in two or three places, and fine-tunes often change one and forget the others. For each
such thing one place wins. Where another one says something else, the start tells it in a line like this:

    end ids: what generation_config.json says counts; config.json says [300], which does not (docs/checkpoints.md)

`inflight serve` shows these lines above `ready`, and the logs have them as warnings. To follow the other place,
change the file that wins. The rules are those of transformers 5; the last column says where and why one differs.

A checkpoint that contradicts itself in its sizes (heads, layers, rows of a tensor) is refused, with the names of both.
`tests/engine/test_precedence.py` builds a checkpoint for each row, and most are held to what transformers makes of it.

| what | places, the winner first | rule | why |
|---|---|---|---|
"""


def checkpoints_page() -> str:
    """Return the page."""
    rows = [f"| {name} | {'; '.join(one.places)} | {one.rule} | {one.why} |" for name, one in FACTS.items()]
    return _HEAD + "\n".join(rows) + "\n"
