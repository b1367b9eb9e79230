"""How much each layer suffers from its quantization, measured; and which layers therefore stay in 16 bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from inflight.export.data import Example
from inflight.export.progress import Progress, tracked
from inflight.export.quantize.modelopt import QuantizedModel, Recipe
from inflight.export.verify.measures import kl_divergence

_FILE = "sensitivity.json"


@dataclass(frozen=True)
class Sensitivity:
    """One group of linears that an engine computes as one."""

    linears: tuple[str, ...]
    kl_divergence: float
    """Mean over positions, in nats, with this group alone quantized."""
    parameters: int


def measure_sensitivity(
    checkpoint: Path, recipe: Recipe, examples: Sequence[Example], probes: int, device: str, progress: Progress
) -> list[Sensitivity]:
    """Quantize one group of linears at a time, and compare the next token's distribution with the original's.

    Args:
        checkpoint: the original.
        recipe: what is to be done to all of them.
        examples: calibration data.
        probes: how many of the examples are used to compare.
        device: ``cpu`` or ``cuda``.
        progress: told about each group.

    Returns:
        The groups, the most sensitive first.
    """
    quantized = QuantizedModel(checkpoint, recipe, examples, device, progress)
    probed = sorted(examples, key=lambda one: len(one.tokens), reverse=True)[:probes]
    quantized.quantize_only(())
    original = [quantized.logits(example) for example in probed]
    found = []
    for group in tracked(quantized.groups(), "measuring sensitivity", progress):
        quantized.quantize_only(group)
        total = sum(
            float(kl_divergence(before, quantized.logits(example)).sum())
            for before, example in zip(original, probed, strict=True)
        )
        positions = sum(len(before) for before in original)
        parameters = sum(quantized.model.get_submodule(name).weight.numel() for name in group)
        found.append(Sensitivity(group, total / positions, parameters))
    return sorted(found, key=lambda one: -one.kl_divergence)


def write_sensitivities(found: Sequence[Sensitivity], directory: Path) -> None:
    """Write what was measured."""
    (directory / _FILE).write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


def read_sensitivities(directory: Path) -> list[Sensitivity]:
    """Read what ``write_sensitivities`` wrote."""
    rows = json.loads((directory / _FILE).read_text())
    return [Sensitivity(tuple(row.pop("linears")), **row) for row in rows]


def choose_kept(sensitivities: Sequence[Sensitivity], budget: float) -> tuple[str, ...]:
    """Return the linears to keep in 16 bit, so that what the others lose together stays within ``budget`` (nats).

    Losses of single groups are added up, as if they were independent; for small losses that is nearly so
    (HAWQ-V2, arXiv:1911.03852, adds up per-layer perturbations in the same way).
    """
    kept: list[str] = []
    rest = sum(one.kl_divergence for one in sensitivities)
    for one in sorted(sensitivities, key=lambda one: -one.kl_divergence):
        if rest <= budget:
            break
        kept += one.linears
        rest -= one.kl_divergence
    return tuple(sorted(kept))
