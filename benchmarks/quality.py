"""What the demo model loses, by the measures of `inflight build`: its text is real, so that quality means something."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inflight.engine.scoring import Scorer
from inflight.export.data import DataSet, Example, Source
from inflight.export.stages import Journal
from inflight.export.verify.measures import measure
from inflight.resources import HELD_OUT_DATA
from inflight.text.tokenizer import Tokenizer

KvType = Literal["auto", "fp8", "int8", "bfloat16", "float32"]


@dataclass(frozen=True)
class Loss:
    """What a checkpoint loses beside the original."""

    perplexity: float
    increase_percent: float
    """The increase of perplexity."""
    kl_divergence: float
    """The mean over positions, in nats."""


class Demo:
    """The demo model in float32 and its held-out text."""

    def __init__(self, directory: Path, count: int) -> None:
        """
        Args:
            directory: the checkpoint's.
            count: examples to take.

        Raises:
            DeploymentError: the checkpoint or the text cannot be used.
        """
        self.directory = directory
        tokenizer = Tokenizer.from_checkpoint(directory)
        self._original = Scorer(directory, "float32", "float32", "cpu")
        self.examples: list[Example] = DataSet([Source(HELD_OUT_DATA)], count).examples(
            tokenizer, self._original.max_length
        )

    def loss(self, directory: Path, kv_dtype: KvType = "auto") -> Loss:
        """Return what another checkpoint, or another type of the KV cache, loses."""
        found = measure(
            self._original,
            Scorer(directory, "float32", kv_dtype, "cpu"),
            self.examples,
            [],
            (),
            lambda *_: None,
            Journal(),
        )
        return Loss(
            round(found.perplexity[1], 5),
            round(100 * found.perplexity_increase, 3) + 0.0,  # zero without a minus
            float(f"{found.kl_divergence:.3g}"),
        )
