"""Engines that speculate: with a draft model that is nearly the target, and with drafts that are foretold."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from inflight.engine.engine import Engine
from inflight.engine.request import Output, Request
from inflight.engine.sequence import Sequence
from inflight.settings.speculation import SpeculationSettings
from tests.engine.support.checkpoints import VOCAB, checkpoint, greedy
from tests.engine.support.driving import load


@functools.cache
def alike(name: str, noise: float) -> Path:
    """Return a checkpoint that agrees with another one on some tokens: the same weights, shaken."""
    source, torch_state = checkpoint(name), torch.Generator().manual_seed(1)
    target = source.with_name(f"{source.name}-shaken-{noise}")
    target.mkdir()
    weights = load_file(source / "model.safetensors")
    shaken = {
        key: tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=torch_state)
        for key, tensor in weights.items()
    }
    save_file(shaken, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def speculating(name: str = "llama", method: str = "draft_target", noise: float = 0.1, **more: Any) -> Engine:
    """Return an engine that always drafts all it may."""
    drafts: dict[str, Any] = {
        name: more.pop(name) for name in ("max_draft_tokens", "adaptive", "candidates") if name in more
    }
    if method == "draft_target":
        drafts["draft_model"] = alike(name, noise)
    settings = SpeculationSettings.model_validate({"method": method, "adaptive": False} | drafts)
    return load(checkpoint(name), speculation=settings, **more)


class Oracle:
    """A drafter that knows what comes, and is wrong where it is told to be."""

    def __init__(
        self, tokens: Mapping[int, list[int]], wrong_at: frozenset[int] = frozenset(), tree: bool = False
    ) -> None:
        """
        Args:
            tokens: what comes, by request.
            wrong_at: places of output where another token is drafted.
            tree: put wrong guesses before: one that is wrong at once, and one behind its first token.
        """
        self._tokens, self._wrong_at, self._tree = tokens, wrong_at, tree

    def prepare(self, wanted: Mapping[Sequence, int]) -> None:
        """There is nothing to learn."""

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[list[int]]]:
        """Return what comes."""
        return {one: self._guesses(one, count) for one, count in wanted.items()}

    def _guesses(self, one: Sequence, count: int) -> list[list[int]]:
        right = [
            (token + (one.generated + place in self._wrong_at)) % VOCAB
            for place, token in enumerate(self._tokens[one.request.key][one.generated :][:count])
        ]
        wrong = [(token + 1) % VOCAB for token in right]
        return [wrong[:2], [*right[:1], *wrong[1:]], right] if self._tree else [right]

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""

    def check_idle(self) -> None:
        """Nothing is kept."""


def foretold(
    requests: list[Request],
    wrong_at: frozenset[int] = frozenset(),
    tree: bool = False,
    name: str = "llama",
    **settings: Any,
) -> Engine:
    """Return an engine whose drafts are what transformers generates greedily, but for some places."""
    engine = speculating(name, "ngram", **({"max_draft_tokens": 5, "candidates": 3 if tree else 1} | settings))
    known = {one.key: greedy(name, tuple(one.prompt), one.sampling.max_tokens) for one in requests}
    engine._speculator._drafter = Oracle(known, wrong_at, tree)
    return engine


def shown(output: Output) -> tuple[Any, ...]:
    """What a client gets of an output, without scores."""
    return output.tokens, output.finish_reason, output.text_limit
