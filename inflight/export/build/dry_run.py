"""A dry run: what a build would do, on any machine, as a screen of text or, whole, as one document.

Nothing runs and nothing is written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from inflight.export.build import steps
from inflight.export.build.blueprint import Blueprint
from inflight.export.build.request import DataRequest
from inflight.export.interpreters import ENVIRONMENT_VARIABLE as VARIABLE
from inflight.export.plan.rows import summary
from inflight.export.quantize.schemes import SCHEMES
from inflight.trtllm.arguments import llm_arguments

_SHOWN = ("parameters", "one replica", "KV cache", "sequences that fit", "max_batch_size", "one replica, full")
"""Of what the plan says."""


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
        "interpreters": _interpreters(blueprint, "Inflight's own"),
        "plan": blueprint.plan.as_dict(),
        "quantize": _quantize(blueprint),
        "compile": _compile(blueprint),
        "verify": _verify(blueprint),
        "write": {"to": str(blueprint.request.output), "deployment.yaml": dict(blueprint.settings)},
    }


def as_summary(blueprint: Blueprint) -> str:
    """Return a screen: what is built, for what, how large it is, and what each stage does."""
    checkpoint, plan = blueprint.checkpoint, blueprint.plan
    replica = plan.tensor_parallel_size * plan.pipeline_parallel_size
    before = _size(checkpoint.size) if checkpoint.weights else "not here, which a build needs"
    lines = [
        f"{checkpoint.name} for {replica} x {blueprint.gpu.title}",
        *_pairs(
            (
                "engine",
                blueprint.engine if blueprint.flow == "portable" else f"{blueprint.engine}, {blueprint.flow} flow",
            ),
            ("checkpoint", f"weights {before}"),
            *((name, text) for name, text in summary(plan) if name in _SHOWN),
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
    named = blueprint.request.tensorrt_llm_python
    found = (
        str(named)
        if named
        else f"the first python3 that has TensorRT-LLM; --tensorrt-llm-python or {VARIABLE} names it"
    )
    return {"plan, quantize": own, "compile": found, "verify, write": own}


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _pairs(*pairs: tuple[str, str]) -> list[str]:
    return [f"  {name:<19} {text}" for name, text in pairs]


def _stage_lines(blueprint: Blueprint) -> list[tuple[str, str]]:
    request, data = blueprint.request, blueprint.request.data
    quantize, compile_, verify = _quantize(blueprint), _compile(blueprint), _verify(blueprint)
    if not isinstance(quantize, str):
        kept = f", {len(blueprint.recipe.keep)} linears kept in 16 bit" if blueprint.recipe.keep else ""
        quantize = f"{quantize['weights']}{kept}; calibrated with {data.calibration_rows:,} rows"
    if not isinstance(compile_, str):
        purposes = [purpose for command in compile_["commands"] for purpose in command]
        compile_ = "; ".join(purposes) or "nothing to do: TensorRT-LLM's PyTorch flow runs the checkpoint as it is"
    if not isinstance(verify, str):
        verify = (
            f"{data.held_out_rows:,} rows and {data.recall_prompts} long prompts against the original; fails where "
            f"perplexity rises by {blueprint.quality.max_perplexity_increase:.2%}"
        )
    return [
        ("quantize", str(quantize)),
        ("compile", str(compile_)),
        ("verify", str(verify)),
        ("write", f"{request.output}, about {_size(blueprint.plan.weight_bytes)}"),
    ]


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
