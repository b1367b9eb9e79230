"""One step's recurrent layers in plain PyTorch, for any device: the sibling of ``torch_backend`` for states.

Tokens of prompts go chunk by chunk, each sequence alone. Generated tokens go one by one by the other rule, those of all
sequences at once, and so they do when a preempted sequence computes them again: a token's bits depend on its sequence
and its place in it alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.engine.kvcache.state_pool import StatePool
from inflight.engine.models.config import STATE_CHUNK
from inflight.engine.models.gated_delta_net import DeltaInputs, DeltaRule, DeltaState


@dataclass(frozen=True)
class StateRange:
    """The tokens of one sequence in a step, adjacent in the packed batch."""

    first: int
    """Index of the first of them in the packed batch."""
    start: int
    """Position of the first of them in the sequence."""
    count: int
    """How many they are."""
    prompt: int
    """Tokens of the sequence's prompt."""
    slot: int
    """Where the sequence's state is."""

    @property
    def generated(self) -> int:
        """Index in the packed batch of the first token that is not the prompt's, or the one behind the last token."""
        return self.first + min(self.count, max(0, self.prompt - self.start))

    def chunks(self) -> Iterator[slice]:
        """Yield which packed tokens of the prompt make a chunk."""
        begin = self.first
        while begin < self.generated:
            position = self.start + begin - self.first
            end = min(self.generated, begin + STATE_CHUNK - position % STATE_CHUNK)
            yield slice(begin, end)
            begin = end


class TorchRecurrence:
    """Called by the model; see ``gated_delta_net.Recur``."""

    def __init__(self, pool: StatePool, ranges: Sequence[StateRange]) -> None:
        """``ranges``: of the step."""
        self._pool = pool
        self._chunks = [(one.slot, part) for one in ranges for part in one.chunks()]
        self._turns: list[tuple[Tensor, Tensor]] = []
        """The generated tokens: in each turn one of each sequence that has some left, and the slots of those."""
        rest = [(one.slot, range(one.generated, one.first + one.count)) for one in ranges]
        while rest := [(slot, tokens) for slot, tokens in rest if tokens]:
            turn = torch.tensor([(tokens[0], slot) for slot, tokens in rest], device=pool.device)
            self._turns.append((turn[:, 0], turn[:, 1]))
            rest = [(slot, tokens[1:]) for slot, tokens in rest]

    def __call__(self, layer: int, inputs: DeltaInputs, rule: DeltaRule) -> Tensor:
        """Tokens behind those of the ranges are padding: they change no state, and their results are zero."""
        stored = self._pool.layers[layer]
        out = torch.zeros((len(inputs.mixed), *stored.matrix.shape[1::2]), device=self._pool.device)
        for slot, part in self._chunks:
            out[part], state = rule.chunk(inputs.of(part), DeltaState(stored.conv[slot], stored.matrix[slot]))
            stored.conv[slot], stored.matrix[slot] = state
        for tokens, slots in self._turns:
            states = DeltaState(stored.conv[slots], stored.matrix[slots])
            out[tokens], states = rule.decode(inputs.of(tokens), states)
            stored.conv[slots], stored.matrix[slots] = states
        return out
