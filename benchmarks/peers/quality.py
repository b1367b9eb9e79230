"""How far each variant's next-token distributions are from a reference's.

Of Llama shapes that is on the demo model, whose text is real, from transformers in float32. The demo model has no
experts: of shapes that have some, it is on the measured checkpoint itself, from ours in 16 bits. That shows that all
compute the same model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.peers.contenders import Place, cores
from benchmarks.peers.jobs import WorkerFailure
from benchmarks.peers.variants import Variant
from benchmarks.peers.workers.work import Cell, normalized, random_prompts
from inflight.resources import DEMO, HELD_OUT_DATA

MODEL = DEMO / "model"
_EXAMPLES = 16
"""Questions with their answers, of the held-out text; vLLM makes an object of each log-prob, which takes its time."""

_RANDOM = Cell(4, 64, 1)
"""Prompts of a checkpoint with random weights."""

LogProbs = npt.NDArray[np.float32]


def kl_divergence(reference: LogProbs, other: LogProbs) -> float:
    """Return the mean over positions of KL(reference || other), in nats; both are log-probs ``[positions, vocab]``.

    Raises:
        ValueError: their shapes differ.
    """
    if reference.shape != other.shape:
        raise ValueError(f"log-probs {other.shape} are compared with {reference.shape}")
    known = reference.astype(np.float64)
    return float((np.exp(known) * (known - other)).sum(axis=1).mean())


class Quality:
    """A model, prompts, and what transformers computes for them in float32."""

    model = MODEL

    def __init__(self, place: Place) -> None:
        self._place = place

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The examples' tokens."""
        from inflight.export.data import DataSet, Source
        from inflight.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_checkpoint(MODEL)
        examples = DataSet([Source(HELD_OUT_DATA)], _EXAMPLES).examples(tokenizer, 1024)
        return [[int(token) for token in example.tokens] for example in examples]

    @cached_property
    def reference(self) -> LogProbs:
        """The log-probs ``[positions, vocab]``."""
        return _reference(self.prompts)

    def loss(self, variant: Variant) -> float:
        """Return a variant's mean KL divergence.

        Raises:
            InflightError: it could not compute it.
        """
        try:
            return kl_divergence(self.reference, self._log_probs(variant))
        except ValueError as error:
            raise WorkerFailure(f"{variant.key}: {error}") from None

    def _log_probs(self, variant: Variant) -> LogProbs:
        worker = self._place.worker(variant.contender, measures=False)
        model = self._place.converted(variant, self.model)
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "log_probs.npy"
            job = {"action": "quality", "model": str(model.resolve()), "settings": dict(variant.settings)}
            asked = {"threads": len(cores()), "prompts": self.prompts, "output": str(output)}
            worker.do(job | asked, self._place.timeout_s)
            found: LogProbs = np.load(output)
            return found


class SameModel(Quality):
    """The measured checkpoint, random prompts, and what ours computes for them."""

    def __init__(self, place: Place, checkpoint: Path, ours: Variant) -> None:
        """``ours`` is the variant of ours that the others are compared with."""
        super().__init__(place)
        self.model, self._ours = checkpoint, ours

    @cached_property
    def prompts(self) -> list[list[int]]:
        """Random ones."""
        return random_prompts(_RANDOM, 0)

    @cached_property
    def reference(self) -> LogProbs:
        """The log-probs ``[positions, vocab]``."""
        return self._log_probs(self._ours)


def _reference(prompts: Iterable[Sequence[int]]) -> LogProbs:
    import torch

    from benchmarks.transformers_peers import load_transformers

    model = load_transformers(MODEL, "cpu")
    with torch.inference_mode():
        rows = [model(torch.tensor([prompt])).logits[0].float().numpy() for prompt in prompts]
    return normalized(np.concatenate(rows))
