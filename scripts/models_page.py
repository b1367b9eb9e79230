"""The page about the models that are served, from the table of architectures and what each part of Inflight can do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from inflight.engine.models.adapted.known import require_unquantized
from inflight.engine.models.architectures import ARCHITECTURES
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.limits import (
    unknown_to_compiler,
    unknown_to_gpu_kernels,
    unknown_to_native_step,
    unknown_to_quantization,
)
from inflight.engine.models.reading import CONDITIONAL, read_model_config
from inflight.errors import DeploymentError
from inflight.gguf.families import FAMILIES
from inflight.trtllm.models import why_unlisted
from scripts.matrix_page import features_table, formats_table

_TESTS = Path(__file__).resolve().parents[1] / "tests"
_SHAPES = {
    "LlamaForCausalLM": "llama-3.1-8b",
    "MistralForCausalLM": "mistral-7b-v0.1",
    "Qwen3ForCausalLM": "qwen3-8b",
    "Gemma3ForCausalLM": "gemma-3-1b",
}
"""Architectures whose published ``config.json`` is among the shapes that the planner is tested with."""
_TEXT_IN_GGUF = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
"""Models with images that llama.cpp's conversion writes as those without; of others it makes another architecture."""
_HEAD = """\
# Models that are served

Written from the code by `make contract`; a test holds them equal.

Each line is an architecture that the portable engine has code of its own for, with a published model of it; its
`config.json` is in `tests/facts/published_configs`, or in `tests/export/shapes`. Of a model that also takes images or
sound (`...ForConditionalGeneration`) the text part is served. `tests/engine` holds each line to transformers, token by
token: a small random checkpoint, alone and in mixed batches with reuse, chunks and preemption.

- *native step*: Inflight's own kernels compute it on a CPU; else PyTorch does, which is several times slower.
- *GPU kernels*: attention and what lies between the products run in kernels on a GPU, and decode steps as graphs; else
  PyTorch alone computes it there, launch by launch, and `tests/gpu` holds it to transformers.
- *quantizes*: `inflight build` quantizes it. A checkpoint that is quantized already may be served whether it does or
  not ([quantization](quantization.md)).
- *GGUF*: it is served from a [GGUF file](gguf.md) too.
- *TensorRT-LLM*: the list of its PyTorch backend names the architecture; *later*: only a newer list does
  (`tests/facts/tensorrt_llm_models.json` has both). Nothing of it has been tried here. `inflight plan` and `inflight
  build` go by the same list: what it does not name is planned and built for the portable engine.
- *compiled*: `inflight build --flow tensorrt` has the commands that compile an engine of it.

Models that only transformers' code computes are listed in [adapter.md](adapter.md#what-is-served). `inflight plan` and
`inflight models` outline them without weights; `inflight build` refuses them by name. Below are the
[formats](#architectures-by-format) and the [features](#features-by-engine).

"""
_COLUMNS = (
    "architecture", "a model", "attention", "feed-forward", "native step", "GPU kernels", "quantizes", "GGUF",
    "TensorRT-LLM", "compiled",
)  # fmt: skip


def models_page() -> str:
    """Return the page."""
    configs: dict[str, ModelConfig] = {}
    records = _records()
    earlier, later = (set(one["architectures"]) for one in _json("facts/tensorrt_llm_models.json")["lists"])
    rows = []
    for _, (model, data) in sorted(records.items(), key=lambda item: item[0].lower()):
        config = read_model_config(data)
        name = data["architectures"][0]
        listed = "yes" if name in earlier else "later" if name in later else "no"
        title = f"`{name}`" + (f", text of `{config.architecture}`" if name.endswith(CONDITIONAL) else "")
        configs[title] = config
        cells = [
            title,
            model,
            _attention(config),
            _feed_forward(config),
            *(_yes_or(unknown(config)) for unknown in (unknown_to_native_step, unknown_to_gpu_kernels)),
            _yes_or(unknown_to_quantization(config)),
            "yes" if _in_gguf(name, config) else "no",
            listed,
            _yes_or((["not on TensorRT-LLM's list"] if why_unlisted(config) else []) + unknown_to_compiler(config)),
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
    plain = configs["`LlamaForCausalLM`"]
    portable = {
        "own code": plain,
        "own code, latent": configs["`DeepseekV3ForCausalLM`"],
        "own code, hybrids": configs["`Qwen3NextForCausalLM`"],
        "transformers' code": replace(plain, modeling="transformers"),
    }
    head = f"{_HEAD}| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|\n"
    return head + "".join(rows) + formats_table(configs, quantized_and_adapted()) + features_table(portable)


def quantized_and_adapted() -> str:
    """Return the words in which quantized checkpoints are refused where transformers' code computes."""
    try:
        require_unquantized({"quantization_config": {"quant_method": "gptq"}})
    except DeploymentError as error:
        return str(error)
    raise AssertionError("they are not refused")


def _in_gguf(name: str, config: ModelConfig) -> bool:
    """Return whether a GGUF file of a model is served; ``name``: in ``architectures`` of its ``config.json``."""
    families = [*FAMILIES.values(), *(other for one in FAMILIES.values() for _, other in one.variants)]
    known = config.architecture in {family.architecture for family in families}
    return known and (name in _TEXT_IN_GGUF or not name.endswith(CONDITIONAL))


def _records() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the model and ``config.json`` of each architecture that is served, by its name."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in sorted((_TESTS / "facts/published_configs").glob("*.json")):
        record = json.loads(path.read_text())
        try:
            config = read_model_config(record["config"])
        except DeploymentError:
            continue
        name = record["config"]["architectures"][0]
        key = f"{name}, text of {config.architecture}" if name.endswith(CONDITIONAL) else name
        found.setdefault(key, (record["model"], record["config"]))
    for name, folder in _SHAPES.items():
        data = _json(f"export/shapes/{folder}/config.json")
        found.setdefault(name, (folder, data))
    missing = ARCHITECTURES.keys() - {read_model_config(data).architecture for _, data in found.values()}
    if missing:
        raise KeyError(f"no published config.json is recorded of {sorted(missing)}")
    return found


def _json(path: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((_TESTS / path).read_text())
    return data


def _attention(config: ModelConfig) -> str:
    layers = list(config.attention.values())
    parts = ["latent" if layers[0].latent else "grouped"]
    windows = {one.window or one.chunk for one in layers} - {None}
    full = sum(one.window is None and one.chunk is None for one in layers)
    if windows:
        parts.append(f"{len(layers) - full} of {len(layers)} layers reach {max(filter(None, windows)):,} tokens")
    parts += ["sinks"] * layers[0].sinks + ["soft cap"] * (layers[0].softcap is not None)
    unrotated = sum(one.rope is None for one in layers)
    if unrotated:
        parts.append(f"{unrotated} layers without rotary embedding")
    if config.recurrent:
        parts.append(f"{len(config.recurrent)} of {config.num_layers} layers have a recurrent state (Gated DeltaNet)")
    return ", ".join(parts)


def _feed_forward(config: ModelConfig) -> str:
    experts = [layer.experts for layer in config.layers if layer.experts is not None]
    if not experts:
        return "dense"
    shared = ", one shared" if experts[0].shared_size else ""
    some = f" in {len(experts)} of {config.num_layers} layers" if len(experts) < config.num_layers else ""
    return f"{experts[0].num_experts} experts, {experts[0].per_token} for a token{shared}{some}"


def _yes_or(unknown: list[str]) -> str:
    return "yes" if not unknown else f"no: {', '.join(unknown)}"
