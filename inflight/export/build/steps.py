"""What each stage of a build does, into a directory of its own. When it runs is the pipeline's concern."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError
from inflight.export.build.blueprint import READABLE, Blueprint
from inflight.export.build.request import DataRequest
from inflight.export.build.settings import ENGINE, MODEL
from inflight.export.checkpoint import Checkpoint
from inflight.export.compile.run import Command, run_commands
from inflight.export.compile.steps import compile_steps
from inflight.export.data import DataSet, Example
from inflight.export.plan.detect import cpu_threads, measure_cpu
from inflight.export.plan.gpus import Gpu
from inflight.export.plan.plan import Plan
from inflight.export.progress import Progress
from inflight.export.quantize.config_file import write_config
from inflight.export.quantize.modelopt import QuantizedModel, copy_text_files, quiet
from inflight.export.quantize.sensitivity import measure_sensitivity, write_sensitivities
from inflight.export.verify.checks import check, failure
from inflight.export.verify.layers import LayerCost, layer_costs
from inflight.export.verify.measures import Quality, measure
from inflight.export.verify.recall import recall_examples
from inflight.export.verify.report import quality_page
from inflight.report.results import cpu_model, provenance
from inflight.text.tokenizer import Tokenizer

PROBES = 16
"""Calibration rows that sensitivity is measured on; the longest."""
PLAN, QUALITY, PAGE = "plan.json", "quality.json", "quality.html"
"""Names within stages and deployments."""
_MACHINE = "machine.json"


@dataclass(frozen=True)
class Materials:
    """What the stages work with, besides the checkpoint."""

    tokenizer: Tokenizer
    calibration: DataSet
    held_out: DataSet
    request: DataRequest
    device: str

    def examples(self) -> list[Example]:
        """Return the calibration data."""
        return self.calibration.examples(self.tokenizer, self.request.calibration_length)


def machine_inputs() -> dict[str, Any]:
    """Return what tells this machine from another."""
    return {"cpu": cpu_model(), "threads": cpu_threads(), "GiB": round(psutil.virtual_memory().total / 2**30)}


def measure_machine(out: Path) -> str:
    """Measure this machine as a GPU."""
    gpu = measure_cpu()
    (out / _MACHINE).write_text(gpu.model_dump_json(indent=1) + "\n")
    return f"{gpu.title}: {gpu.memory_mib / 1024:.1f} GiB free, {gpu.bandwidth_gb_s:.1f} GB/s"


def read_machine(measured: Path) -> Gpu:
    """Return what ``measure_machine`` wrote."""
    return Gpu.model_validate_json((measured / _MACHINE).read_text())


def write_plan(plan: Plan, out: Path) -> str:
    """Write the plan."""
    (out / PLAN).write_text(json.dumps(plan.as_dict(), indent=1) + "\n")
    gpus = plan.tensor_parallel_size * plan.pipeline_parallel_size
    return f"{plan.precision} on {gpus} x {plan.gpu.name}, KV cache {plan.kv_cache}, batches of {plan.max_batch_size}"


def measure_layers(blueprint: Blueprint, materials: Materials, out: Path, progress: Progress) -> str:
    """Measure what each group of linears loses."""
    with quiet(out / "modelopt.log"):
        found = measure_sensitivity(
            blueprint.checkpoint.directory, blueprint.recipe, materials.examples(), PROBES, materials.device, progress
        )
    write_sensitivities(found, out)
    return f"{len(found)} groups of linears; the most sensitive is {found[0].linears[0]}"


def quantize(blueprint: Blueprint, materials: Materials, out: Path, progress: Progress) -> str:
    """Quantize, or take the checkpoint as it is."""
    source, target = blueprint.checkpoint, out / MODEL
    target.mkdir()
    if blueprint.quantizes:
        with quiet(out / "modelopt.log"):
            model = QuantizedModel(source.directory, blueprint.recipe, materials.examples(), materials.device, progress)
            progress("writing the quantized checkpoint", 0, 0)
            model.save(target)
        sizes = f"{_megabytes(source.size)} to {_megabytes(weight_bytes(target))}"
        return f"{sizes}, calibrated with {materials.calibration.describe()}"
    copy_text_files(source.directory, target)
    for file in (*source.weights, *source.directory.glob("*.json")):
        if not (target / file.name).exists():
            link_or_copy(file, target / file.name)
    write_config(source.directory, target)
    return f"the checkpoint as it is, {_megabytes(source.size)}"


def commands(blueprint: Blueprint, out: Path) -> list[Command]:
    """Return what compiles the engine into ``out``."""
    calibration = out / "calibration" / "calibration.jsonl"
    request = blueprint.compile_request(blueprint.checkpoint.directory, out / ENGINE, calibration)
    return [] if request is None else compile_steps(request)


def compile_engine(blueprint: Blueprint, materials: Materials, out: Path, progress: Progress) -> str:
    """Compile the engine, with upstream's tools."""
    texts = (materials.tokenizer.decode(example.tokens) for example in materials.examples())
    (out / "calibration").mkdir()
    (out / "calibration" / "calibration.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    if not blueprint.is_readable:
        _link_readable(blueprint.checkpoint, out / READABLE)
    steps = commands(blueprint, out)

    def show(line: str) -> None:
        progress(line, 0, 0)

    run_commands(steps, out / "logs", show)
    size = sum(file.stat().st_size for file in (out / ENGINE).iterdir())
    return f"{_megabytes(size)} for compute capability {blueprint.gpu.compute_capability}"


def _link_readable(checkpoint: Checkpoint, target: Path) -> None:
    """Lay out a checkpoint with a ``config.json`` that TensorRT-LLM's tools, on transformers 4, read right."""
    link_files(sorted(path for path in checkpoint.directory.iterdir() if path.is_file()), target)
    write_config(checkpoint.directory, target)


def verify(blueprint: Blueprint, materials: Materials, quantized: Path, out: Path, progress: Progress) -> str:
    """Measure the quantized checkpoint beside the original, on the portable engine."""
    settings = blueprint.deployment
    original = Scorer(blueprint.checkpoint.directory, settings.engine.dtype, device=materials.device)
    other = Scorer(quantized / MODEL, settings.engine.dtype, settings.kv_cache.dtype, materials.device)
    length = min(materials.request.max_length, original.max_length)
    examples = materials.held_out.examples(materials.tokenizer, length)
    recall = recall_examples(materials.held_out, materials.tokenizer, length, materials.request.recall_prompts)
    quality = measure(original, other, examples, recall, materials.tokenizer.config.end_ids, progress)
    costs = layer_costs(original, other, examples, progress)
    record: dict[str, Any] = {
        **provenance(),
        "command": blueprint.request.command,
        "precision": blueprint.recipe.precision,
    }
    record |= {"bytes": {"original": blueprint.checkpoint.size, "quantized": weight_bytes(quantized / MODEL)}}
    record |= {"quality": asdict(quality), "costs": [asdict(cost) for cost in costs]}
    (out / QUALITY).write_text(json.dumps(record, indent=1) + "\n")
    (before, after), (right, still), (recalled, again) = quality.perplexity, quality.exact, quality.recalled
    return (
        f"perplexity {before:.4f} to {after:.4f}, KL divergence {quality.kl_divergence:.5f} nats; "
        f"{right} to {still} exact answers, {recalled} to {again} recalled from long prompts"
    )


def read_quality(measured: Path) -> tuple[Quality, list[LayerCost], str]:
    """Return what the verify stage found, and one line about where and when."""
    record = json.loads((measured / QUALITY).read_text())
    source = f"{record['command']}; commit {record['commit']}, {record['machine']}, {record['date']}"
    quality = record["quality"]
    for name in ("perplexity", "exact", "recalled"):
        quality[name] = tuple(quality[name])
    return Quality(**quality), [LayerCost(**cost) for cost in record["costs"]], source


def require_quality(blueprint: Blueprint, materials: Materials, quantized: Path, measured: Path) -> None:
    """Write the report beside the measurements, and hold them against the thresholds.

    Raises:
        DeploymentError: what falls short, the layers that cost most, and where the report is.
    """
    quality, costs, source = read_quality(measured)
    checks = check(quality, costs, blueprint.quality)
    original = blueprint.checkpoint
    page = quality_page(
        f"{original.name} in {blueprint.recipe.precision}",
        {
            "held-out data": materials.held_out.describe(),
            "calibration data": materials.calibration.describe(),
            "KV cache": blueprint.plan.kv_cache,
            "kept in 16 bit": ", ".join(blueprint.recipe.keep) or "embedding, norms and lm_head alone",
            "computed in": f"{blueprint.deployment.engine.dtype}, by the portable engine",
        },
        {"original": original.size, blueprint.recipe.precision: weight_bytes(quantized / MODEL)},
        quality,
        checks,
        costs,
        source,
    )
    (measured / PAGE).write_text(page, encoding="utf-8")
    if short := failure(checks, costs):
        raise DeploymentError(f"{short}. The report: {measured / PAGE}")


def weight_bytes(directory: Path) -> int:
    """Return the bytes of a checkpoint's safetensors files."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def is_linked(source: Path, target_device: int) -> bool:
    """Whether a file gets a second name in place of a copy: weights and engines, which nobody edits in place."""
    return source.suffix in (".safetensors", ".engine") and source.stat().st_dev == target_device


def link_or_copy(source: Path, target: Path) -> None:
    """Give weights and engines a second name where the disk can; copy the rest."""
    if is_linked(source.resolve(), target.parent.stat().st_dev):
        os.link(source.resolve(), target)
    else:
        shutil.copyfile(source, target)


def link_files(sources: Sequence[Path], target: Path) -> None:
    """Give files, by their own names, a place in ``target``, which is made."""
    target.mkdir(parents=True)
    for source in sources:
        link_or_copy(source, target / source.name)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.2f} MB"
