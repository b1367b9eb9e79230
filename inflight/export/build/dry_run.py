"""A dry run: what a build would do, on any machine, as a screen of text or, whole, as one document.

Nothing runs and nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from inflight.export.build.blueprint import Blueprint
from inflight.export.data import Source
from inflight.export.interpreters import ENVIRONMENT_VARIABLE as VARIABLE
from inflight.export.plan.report import summary
from inflight.export.quantize.modelopt import SCHEMES
from inflight.trtllm.arguments import llm_arguments

_SHOWN = ("parameters", "one replica", "KV cache", "sequences that fit", "max_batch_size", "one replica, full")
"""The lines of the plan that the summary shows."""


def as_text(blueprint: Blueprint) -> str:
    """Return the plan, and each stage with its commands and its configuration, as YAML; equal builds, equal texts."""
    checkpoint, recipe = blueprint.checkpoint, blueprint.recipe
    document = {
        "build": {
            "model": checkpoint.name,
            "weights": f"{checkpoint.size / 1e9:.2f} GB" if checkpoint.weights else "not here: a build needs them",
            "gpu": blueprint.plan.gpu.title,
            "precision": recipe.precision,
            "engine": blueprint.engine,
            "flow": blueprint.flow,
            "because": list(blueprint.reasons),
        },
        "interpreters": _interpreters(blueprint, "Inflight's own"),
        "plan": blueprint.plan.as_dict(),
        "quantize": _quantize(blueprint),
        "compile": _compile(blueprint),
        "verify": _verify(blueprint),
        "write": {"to": str(blueprint.request.output), "deployment.yaml": dict(blueprint.settings)},
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def as_summary(blueprint: Blueprint) -> str:
    """Return a screen: what is built, for what, how large it is, and what each stage does."""
    checkpoint, plan = blueprint.checkpoint, blueprint.plan
    before = _size(checkpoint.size) if checkpoint.weights else "not here, which a build needs"
    flow = "" if blueprint.flow == "portable" else f", {blueprint.flow} flow"
    lines = [
        f"{checkpoint.name} for {plan.gpus_per_replica} x {blueprint.plan.gpu.title}",
        *_pairs(
            ("engine", f"{blueprint.engine}{flow}"),
            ("checkpoint", f"weights {before}"),
            *((name, text) for name, text in summary(plan).items() if name in _SHOWN),
        ),
        "stages",
        *_pairs(*_stage_lines(blueprint)),
        "interpreters",
        *_pairs(*_interpreters(blueprint, sys.executable).items()),
        *(["because"] if blueprint.reasons else []),
        *(f"  {reason}" for reason in blueprint.reasons),
        "Nothing was run and nothing was written. --verbose prints every command and setting.",
    ]
    return "".join(f"{line}\n" for line in lines)


def _interpreters(blueprint: Blueprint, own: str) -> dict[str, str]:
    """Return which Python runs which stage."""
    if blueprint.flow != "tensorrt":
        return {"all stages": own}
    found = f"the first python3 that has TensorRT-LLM; --tensorrt-llm-python or {VARIABLE} names it"
    return {"plan, quantize": own, "compile": str(blueprint.request.tensorrt_llm_python or found), "verify, write": own}


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _pairs(*pairs: tuple[str, str]) -> list[str]:
    return [f"  {name:<19} {text}" for name, text in pairs]


def _stage_lines(blueprint: Blueprint) -> list[tuple[str, str]]:
    request, data = blueprint.request, blueprint.request.data
    quantize, compile_, verify = _quantize(blueprint), _compile(blueprint), _verify(blueprint)
    if not isinstance(quantize, str):
        kept = f", {len(blueprint.recipe.keep)} linears kept in 16 bit" if blueprint.recipe.keep else ""
        calibrated = f"calibrated with {data.calibration_rows:,} rows" if blueprint.calibrates else "not calibrated"
        quantize = f"{quantize['weights']}{kept}; {calibrated}"
    if not isinstance(compile_, str):
        purposes = [purpose for command in compile_["commands"] for purpose in command]
        compile_ = "; ".join(purposes) or "nothing to do: TensorRT-LLM's PyTorch flow runs the checkpoint as it is"
    if not isinstance(verify, str):
        verify = (
            f"{data.held_out_rows:,} rows and {data.recall_prompts} long prompts against the original; fails where "
            f"perplexity rises by {blueprint.deployment.quality.max_perplexity_increase:.2%}"
        )
    return [
        ("quantize", str(quantize)),
        ("compile", str(compile_)),
        ("verify", str(verify)),
        ("write", f"{request.output}, about {_size(blueprint.plan.weight_bytes)}"),
    ]


def _quantize(blueprint: Blueprint) -> dict[str, Any] | str:
    recipe, data, budget = blueprint.recipe, blueprint.request.data, blueprint.request.kl_budget
    if not blueprint.quantizes:
        return "nothing to do: the checkpoint is served as it is"
    scheme = SCHEMES.get(recipe.precision)
    mixed = f"the most sensitive layers stay in 16 bit until the others lose at most {budget or 0:g} nats"
    if recipe.precision == "int8" and recipe.group:
        return {
            "with": f"compressed-tensors' format, by groups of {recipe.group} inputs",
            "weights": SCHEMES["int8"].meaning,
            "kept in 16 bit": list(recipe.keep) or "embedding, norms and lm_head alone",
            "mixed precision": None if budget is None else mixed,
        }
    return {
        "with": "nvidia-modelopt, to its unified Hugging Face checkpoint",
        "weights": scheme.meaning if scheme else "as they are",
        "modelopt_config": scheme.modelopt_config if scheme else None,
        "quant_algo": scheme.algorithm if scheme else None,
        "kv_cache_quant_algo": "FP8" if recipe.fp8_kv_cache else None,
        "kept in 16 bit": list(recipe.keep) or "embedding, norms and lm_head alone",
        "mixed precision": None if budget is None else mixed,
        "calibration": _sources(data.calibration, data.calibration_rows) if blueprint.calibrates else None,
    }


def _compile(blueprint: Blueprint) -> dict[str, Any] | str:
    if blueprint.engine == "pytorch":
        return "nothing to do: the portable engine runs the checkpoint as it is"
    if blueprint.flow == "tensorrt":
        return {"commands": [{command.purpose: str(command)} for command in blueprint.commands(Path("OUTPUT"))]}
    # The quantized checkpoint is not there yet; its shape is the original's.
    deployment = blueprint.deployment.model_copy(update={"model": blueprint.checkpoint.directory})
    return {"commands": [], "LLM": llm_arguments(deployment) | {"model": blueprint.settings["model"]}}


def _verify(blueprint: Blueprint) -> dict[str, Any] | str:
    data = blueprint.request.data
    if not blueprint.quantizes:
        return "nothing to do: nothing is quantized"
    return {
        "against": "the original checkpoint, both on the portable engine",
        "held out": _sources(data.held_out, data.held_out_rows),
        "recall prompts": data.recall_prompts,
        "thresholds": blueprint.deployment.quality.model_dump(),
    }


def _sources(sources: Sequence[Source], rows: int) -> dict[str, Any]:
    return {"rows": rows, "mix": {source.path.name: source.weight for source in sources}}
