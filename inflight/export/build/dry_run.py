"""A dry run: everything that a build would do, as one document, on any machine. Nothing runs and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from inflight.export.build import steps
from inflight.export.build.blueprint import Blueprint
from inflight.export.build.request import DataRequest
from inflight.export.quantize.schemes import SCHEMES
from inflight.trtllm.arguments import llm_arguments


def describe(blueprint: Blueprint) -> dict[str, Any]:
    """Return the plan, and each stage with its commands and its configuration; equal builds, equal documents."""
    checkpoint, recipe = blueprint.checkpoint, blueprint.recipe
    return {
        "build": {
            "model": checkpoint.name,
            "weights": f"{checkpoint.size / 1e9:.2f} GB" if checkpoint.weights else "not here: a build needs them",
            "gpu": blueprint.gpu.title,
            "precision": recipe.precision,
            "engine": blueprint.engine,
            "flow": blueprint.flow,
            "because": list(blueprint.reasons),
        },
        "plan": blueprint.plan.as_dict(),
        "quantize": _quantize(blueprint),
        "compile": _compile(blueprint),
        "verify": _verify(blueprint),
        "write": {"to": str(blueprint.request.output), "deployment.yaml": dict(blueprint.settings)},
    }


def as_text(blueprint: Blueprint) -> str:
    """Return the document as YAML."""
    return yaml.safe_dump(describe(blueprint), sort_keys=False, allow_unicode=True, width=120)


def _quantize(blueprint: Blueprint) -> dict[str, Any] | str:
    recipe, data = blueprint.recipe, blueprint.request.data
    if not blueprint.quantizes:
        return "nothing to do: the checkpoint is served as it is"
    scheme = SCHEMES.get(recipe.precision)
    return {
        "with": "nvidia-modelopt, to its unified Hugging Face checkpoint",
        "weights": scheme.meaning if scheme else "as they are",
        "modelopt_config": scheme.modelopt_config if scheme else None,
        "quant_algo": scheme.algorithm if scheme else None,
        "kv_cache_quant_algo": "FP8" if recipe.fp8_kv_cache else None,
        "kept in 16 bit": list(recipe.keep) or "embedding, norms and lm_head alone",
        "mixed precision": _mixed(blueprint),
        "calibration": _sources(data.calibration, data.calibration_rows),
    }


def _mixed(blueprint: Blueprint) -> str | None:
    budget = blueprint.request.kl_budget
    return (
        None
        if budget is None
        else f"the most sensitive layers stay in 16 bit until the others lose at most {budget:g} nats"
    )


def _compile(blueprint: Blueprint) -> dict[str, Any] | str:
    if blueprint.engine == "pytorch":
        return "nothing to do: the portable engine runs the checkpoint as it is"
    if blueprint.flow == "tensorrt":
        commands = steps.commands(blueprint, Path("OUTPUT"))
        return {"commands": [{command.purpose: str(command)} for command in commands]}
    # The quantized checkpoint is not there yet; its shape is the original's.
    deployment = blueprint.deployment.model_copy(update={"model": blueprint.checkpoint.directory})
    return {"commands": [], "LLM": llm_arguments(deployment) | {"model": blueprint.settings["model"]}}


def _verify(blueprint: Blueprint) -> dict[str, Any] | str:
    data: DataRequest = blueprint.request.data
    if not blueprint.quantizes:
        return "nothing to do: nothing is quantized"
    return {
        "against": "the original checkpoint, both on the portable engine",
        "held out": _sources(data.held_out, data.held_out_rows),
        "recall prompts": data.recall_prompts,
        "thresholds": blueprint.quality.model_dump(),
    }


def _sources(sources: Any, rows: int) -> dict[str, Any]:
    return {"rows": rows, "mix": {source.path.name: source.weight for source in sources}}
