"""The tables of formats and of features: each cell is what the code that refuses says, or that it does not refuse."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inflight.engine.beam_search.group import check_beams
from inflight.engine.config import EngineConfig
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.limits import check_invariant, why_not_native
from inflight.engine.models.rope import ROPE_TYPES
from inflight.engine.quant.config import LayerQuantization
from inflight.engine.quant.readers.methods import READERS
from inflight.engine.recurrent import check_beam_width, check_recurrent
from inflight.engine.request import Request, check_portable
from inflight.errors import DeploymentError, InflightError
from inflight.export.compile.steps import PRECISIONS
from inflight.export.plan.stored import TENSORS, packed_as
from inflight.export.quantize.modelopt import SCHEMES
from inflight.resources import DEMO
from inflight.sampling import Guide, SamplingParams
from inflight.settings.deployment import Deployment, validate
from inflight.trtllm.arguments import llm_arguments, sampler
from inflight.trtllm.request_arguments import check

_INT = {"type": "int", "symmetric": True}
_INT4 = _INT | {"num_bits": 4, "strategy": "group", "group_size": 128}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_FLOAT4 = {"num_bits": 4, "type": "float"}
_NVFP4 = _FLOAT4 | {"strategy": "tensor_group", "group_size": 16}
_TOKENS = {"strategy": "token", "dynamic": True}


def _compressed(stored: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}


FORMATS: dict[str, dict[str, Any]] = {
    "FP8 (ModelOpt)": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "INT8 (ModelOpt)": {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"},
    "INT4 AWQ (ModelOpt)": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128},
    "FP8 by blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "FP8 (compressed-tensors)": _compressed("float-quantized", _FP8, _FP8 | _TOKENS),
    "INT8 (compressed-tensors)": _compressed(
        "int-quantized", _INT | {"num_bits": 8, "strategy": "channel"}, _INT | {"num_bits": 8} | _TOKENS
    ),
    "INT4 (compressed-tensors)": _compressed("pack-quantized", _INT4 | {"symmetric": False}),
    "MXFP4 (compressed-tensors)": _compressed("mxfp4-pack-quantized", _FLOAT4 | {"group_size": 32}),
    "NVFP4 (compressed-tensors)": _compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"}),
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "GPTQ, `desc_act`": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": True},
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
}  # fmt: skip
"""Configurations as checkpoints have them: of each format that is read for every architecture, one or a few."""


@functools.cache
def held(name: str) -> LayerQuantization:
    """Return how the engine holds a linear of a format."""
    described = FORMATS[name]
    found = READERS[described["quant_method"]](described, frozenset(f"one.{kind}" for kind in TENSORS)).of("one")
    assert found is not None
    return found


def computes(config: ModelConfig, name: str | None) -> Literal["native", "PyTorch"]:
    """Return what computes the steps of a model on a CPU, in a format; None: not quantized."""
    native = why_not_native(config) is None and (name is None or _is_native(name))
    return "native" if native else "PyTorch"


@functools.cache
def _is_native(name: str) -> bool:
    return packed_as(held(name), 1024, 1024) is not None


_FORMATS_HEAD = """
## Architectures by format

Each cell says what computes the steps on a CPU: the native step, or PyTorch. *plain* is a checkpoint that is not
quantized, in float32, bfloat16 or float16. On a GPU, weights are [decoded once](quantization.md#on-a-gpu), but for
products in FP8. All these formats are read for every architecture that Inflight has code of its own for:
`tests/engine/test_matrix.py` packs a small checkpoint for each cell, compares every weight with the one that was
packed, and, where only weights are rounded, logits too. [Quantization](quantization.md#other-formats) has the variants
of each format. A checkpoint that has all experts of a layer in one tensor may have them unquantized, or in gpt-oss'
MXFP4.

{refused}

"""


def formats_table(rows: Mapping[str, ModelConfig], adapted: str) -> str:
    """Return the table of architectures by format; ``adapted``: why transformers' code serves none of the formats."""
    lines = [f"| architecture | plain | {' | '.join(FORMATS)} |", "|---" * (len(FORMATS) + 2) + "|"]
    for name, config in rows.items():
        lines.append(f"| {name} | {' | '.join(computes(config, one) for one in (None, *FORMATS))} |")
    lines.append(f"| of transformers' code | PyTorch |{' no |' * len(FORMATS)}")
    refused = f"With transformers' code quantized checkpoints are refused: `{adapted}`."
    return _FORMATS_HEAD.format(refused=refused) + "\n".join(lines) + "\n" + _precisions_table()


def _precisions_table() -> str:
    """Return which of TensorRT-LLM's flows serves what ``inflight build`` makes."""
    lines = [
        "\nWhat `inflight build` makes of a checkpoint, and which flow of TensorRT-LLM serves it:\n",
        "| precision | scheme | PyTorch flow | compiled engine |",
        "|---|---|---|---|",
    ]
    for name, precision in PRECISIONS.items():
        cells = ("yes" if flow in precision.flows else "no" for flow in ("pytorch", "tensorrt"))
        lines.append(f"| {name} | {SCHEMES[name].algorithm if name in SCHEMES else 'as it is'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Feature:
    """What a deployment or a request asks for."""

    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of ``deployment.yaml``, by section."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``SamplingParams``."""
    lora: str | None = None
    """The adapter's name."""
    on_gpu: bool = False
    """Whether the engine runs on a GPU."""

    @property
    def is_of_request(self) -> bool:
        """Whether a request asks for it."""
        return bool(self.sampling or self.lora)


FEATURES: dict[str, Feature] = {
    "prefix reuse": Feature({"kv_cache": {"prefix_reuse": True}}),
    "chunked prefill, chunks of a set size": Feature({"batching": {"prefill_chunk_tokens": 64}}),
    "preemption": Feature({"batching": {"policy": "max_utilization"}}),
    "n-gram drafts": Feature({"speculation": {"method": "ngram"}}),
    "draft model": Feature({"speculation": {"method": "draft_target", "draft_model": "draft"}}),
    "draft trees": Feature({"speculation": {"method": "ngram", "candidates": 2}}),
    "EAGLE": Feature({"speculation": {"method": "eagle", "draft_model": "draft"}}),
    "Medusa": Feature({"speculation": {"method": "medusa", "draft_model": "draft"}}),
    "lookahead": Feature({"speculation": {"method": "lookahead"}}),
    "KV cache in FP8": Feature({"kv_cache": {"dtype": "fp8"}}),
    "KV cache in INT8": Feature({"kv_cache": {"dtype": "int8"}}),
    "KV cache offload": Feature({"kv_cache": {"offload": {"to": "host"}}}),
    "INT8 weights, rounded as they are loaded": Feature({"engine": {"weights": "int8"}}),
    "`batch_invariant` on a GPU": Feature({"engine": {"batch_invariant": True}}, on_gpu=True),
    "beam search": Feature(sampling={"beam_width": 2}),
    "log-probs": Feature(sampling={"log_probs": True}),
    "top log-probs": Feature(sampling={"log_probs": True, "top_log_probs": 2}),
    "prompt logits": Feature(sampling={"context_logits": True}),
    "guided decoding": Feature(sampling={"guide": Guide("json_schema", "{}")}),
    "LoRA adapters": Feature(lora="adapter"),
}
"""What the table has a row for, by its name there."""


def deployment_of(feature: Feature, kind: str) -> Deployment:
    """Return a deployment with what a feature asks for, on an engine. Raises DeploymentError: the engine lacks it."""
    engine = {"kind": kind} | dict(feature.settings.get("engine", {}))
    more: dict[str, Any] = {}
    if kind == "trtllm" and feature.lora:
        more = {"tensorrt_llm": {"lora": {feature.lora: "adapter"}}}
    if kind == "trtllm" and "guide" in feature.sampling:
        more = {"tensorrt_llm": {"guided_decoding": "xgrammar"}}
    if kind == "tensorrtllm":
        more = {"tensorrt_llm": {"engine_dir": "engine"}}
    return validate({"model": str(DEMO / "model"), **feature.settings, "engine": engine, **more}, "deployment.yaml")


def request_of(feature: Feature) -> Request:
    """Return a request for a feature."""
    return Request([1, 2, 3], SamplingParams(4, **feature.sampling), lora=feature.lora)


def refusal(feature: Feature, engine: ModelConfig | str) -> str | None:
    """Return the words in which an engine refuses a feature; None: it does not.

    ``engine``: the portable engine with this model, or the kind of one of TensorRT-LLM's.
    """
    try:
        if isinstance(engine, str):
            deployment = deployment_of(feature, engine)
            if engine == "trtllm":
                llm_arguments(deployment)
                check(request_of(feature).sampling, sampler(deployment), deployment.speculation.method)
        else:
            _ask_portable(feature, engine)
    except InflightError as error:
        return str(error)
    return None


def _ask_portable(feature: Feature, model: ModelConfig) -> None:
    """Ask all that the portable engine refuses by. Raises DeploymentError and UnsupportedFeature."""
    config, request = EngineConfig.of(deployment_of(feature, "pytorch")), request_of(feature)
    check_recurrent(config, model)
    if config.batch_invariant and feature.on_gpu:
        check_invariant(model)
    if config.weights == "int8" and (why := why_not_native(model)) is not None:
        raise DeploymentError(f"engine.weights is int8: {why}")
    check_beams(request, config, model.vocab_size, model.max_position_embeddings)
    check_portable(request, True, config.prefix_reuse, True)
    if model.recurrent:
        check_beam_width(request.sampling.beam_width)


_FEATURES_HEAD = """
## Features by engine

The first four columns are the portable engine. *Own code* is Inflight's own, for the architectures above; *latent* are
those with latent attention (DeepSeek's), *hybrids* those with recurrent layers. *Transformers' code* is the
[adapter](adapter.md). A number leads to the message, below the table, with which the start stops or the request is
refused. For TensorRT-LLM, *yes* means that the deployment is accepted, and its PyTorch flow accepts the request;
*upstream's* means that upstream's backend decides what it does with a request to a compiled engine.
`tests/engine/test_matrix.py` runs the cells of the portable engine, but for `batch_invariant`, which needs a GPU.

Inflight's own code has these types of rotary embedding: {ropes}.
The start stops at others and names them.

"""


def features_table(portable: Mapping[str, ModelConfig]) -> str:
    """Return the table of features by engine."""
    engines: dict[str, ModelConfig | str] = {**portable, "TensorRT-LLM, PyTorch flow": "trtllm",
                                             "TensorRT-LLM, compiled": "tensorrtllm"}  # fmt: skip
    notes: list[str] = []
    lines = [f"| feature | {' | '.join(engines)} |", "|---" * (len(engines) + 1) + "|"]
    for name, feature in FEATURES.items():
        cells = (_cell(feature, engine, notes) for engine in engines.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    head = _FEATURES_HEAD.format(ropes=", ".join(ROPE_TYPES))
    return head + "\n".join(lines) + "\n\n" + "\n".join(_numbered(notes)) + "\n"


def _cell(feature: Feature, engine: ModelConfig | str, notes: list[str]) -> str:
    words = refusal(feature, engine)
    if words is not None:
        if words not in notes:
            notes.append(words)
        return f"no ({notes.index(words) + 1})"
    return "upstream's" if engine == "tensorrtllm" and feature.is_of_request else "yes"


def _numbered(notes: Iterable[str]) -> list[str]:
    return [f"{number}. `{words.replace('`', '')}`" for number, words in enumerate(notes, start=1)]
