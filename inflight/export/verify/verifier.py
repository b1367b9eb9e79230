"""Measures a quantized checkpoint in stages of a build: the whole first, layers only for a failure or on request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inflight.engine.scoring import Scorer, StepScorer
from inflight.export.data import DataSet
from inflight.export.stages import Journal, Progress, Stages
from inflight.export.verify.measures import LayerError, Layers, Quality, measure, recall_examples
from inflight.report.provenance import provenance
from inflight.settings.deployment import Deployment
from inflight.text.tokenizer import Tokenizer

QUALITY = "quality.json"
_COSTS = "costs.json"


@dataclass(frozen=True)
class Measured:
    """A quantized checkpoint's quality, as it was measured."""

    quality: Quality
    errors: list[LayerError]
    """The layers, in their order."""
    source: str
    """The command, commit, machine and date."""
    directory: Path
    """The stage's results."""


@dataclass(frozen=True)
class Verifier:
    """Compares a quantized checkpoint with the original, as the deployment will compute both."""

    original: Path
    quantized: Path
    deployment: Deployment
    tokenizer: Tokenizer
    held_out: DataSet
    recall_prompts: int
    max_length: int
    """Tokens of a held-out row or a long prompt, at most; the model's own limit holds too."""
    device: str
    stages: Stages
    progress: Progress
    facts: Mapping[str, Any]
    """What the record says besides: the command, the precision, the sizes."""

    def measure(self) -> Measured:
        """Measure the quality, unless an earlier run did."""
        journal, inputs = self.stages.journal("verify", self._inputs), self._inputs
        directory = self.stages.run("verify", inputs, lambda out: self._measure(out, journal))
        record = json.loads((directory / QUALITY).read_text())
        return Measured(
            Quality(**record["quality"]),
            [LayerError(**one) for one in record["layers"]],
            f"{record['command']}; commit {record['commit']}, {record['machine']}, {record['date']}",
            directory,
        )

    @property
    def knows_costs(self) -> bool:
        """Whether an earlier run has measured what restoring each layer saves."""
        return self.stages.directory("costs", self._inputs).is_dir()

    def layer_costs(self) -> dict[str, float]:
        """Return what restoring each layer saves, in nats, the dearest first, unless an earlier run measured it."""
        journal = self.stages.journal("costs", self._inputs)

        def work(out: Path) -> str:
            costs = self._layers().costs(self.progress, journal)
            (out / _COSTS).write_text(json.dumps(costs, indent=1) + "\n")
            return f"most is lost in {next(iter(costs))}"

        directory = self.stages.run("costs", self._inputs, work)
        costs: dict[str, float] = json.loads((directory / _COSTS).read_text())
        return costs

    @property
    def _inputs(self) -> dict[str, Any]:
        return {
            "quantized": self.quantized.parent.name,
            "held out": self.held_out.sha256,
            "recall prompts": self.recall_prompts,
            "max length": self.max_length,
            "dtype": self.deployment.engine.dtype,
            "kv cache": self.deployment.kv_cache.dtype,
            "device": self.device,
            "step": [self.deployment.engine.cpu_step, self.deployment.engine.weights],
        }

    def _measure(self, out: Path, journal: Journal) -> str:
        self.progress("loading both checkpoints", 0, 0)
        engine, cache = self.deployment.engine, self.deployment.kv_cache
        original = StepScorer(self.original, engine.dtype, device=self.device, cpu_step=engine.cpu_step)
        other = StepScorer(self.quantized, engine.dtype, cache.dtype, self.device, engine.cpu_step, engine.weights)
        length = min(self.max_length, original.max_length)
        examples = self.held_out.examples(self.tokenizer, length)
        recall = recall_examples(self.held_out, self.tokenizer, length, self.recall_prompts)
        quality = measure(original, other, examples, recall, self.tokenizer.config.end_ids, self.progress, journal)
        del original, other  # both are loaded once more, layer by layer
        errors = [asdict(one) for one in self._layers().errors()]
        record = {**provenance(), **self.facts, "quality": asdict(quality), "layers": errors}
        (out / QUALITY).write_text(json.dumps(record, indent=1) + "\n")
        (before, after), (right, still), (recalled, again) = quality.perplexity, quality.exact, quality.recalled
        return (
            f"perplexity {before:.4f} to {after:.4f} ({quality.perplexity_increase:+.2%}), KL divergence "
            f"{quality.kl_divergence:.5f} nats; {right} to {still} exact answers, {recalled} to {again} recalled from "
            "long prompts"
        )

    def _layers(self) -> Layers:
        self.progress("looking at each layer", 0, 0)
        engine, cache = self.deployment.engine, self.deployment.kv_cache
        original = Scorer(self.original, engine.dtype, device=self.device)
        other = Scorer(self.quantized, engine.dtype, cache.dtype, self.device)
        return Layers(original, other, self.held_out.examples(self.tokenizer, original.max_length))
