"""The grid: every contender, and every way in which it is measured.

A variant of ours is one line here. A contender is judged by the best of its variants in a class, cell by cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Class = Literal["16-bit", "8-bit", "4-bit", "MXFP4, 16-bit", "MXFP4, 8-bit"]
Part = Literal["engine", "http"]
PLAIN: tuple[Class, ...] = ("16-bit", "8-bit", "4-bit")
PACKED: tuple[Class, ...] = ("MXFP4, 16-bit", "MXFP4, 8-bit")
"""Of checkpoints whose experts are in MXFP4, which stay so: the bits of their other weights."""
CLASSES = (*PLAIN, *PACKED)
OURS = "inflight"
WORKERS = {
    OURS: "benchmarks.peers.workers.inflight_engine",
    "vllm": "benchmarks.peers.workers.vllm_cpu",
    "openvino": "benchmarks.peers.workers.openvino_genai",
    "llama.cpp": "benchmarks.peers.workers.llama_cpp_library",
}
"""The worker program of each contender."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One way to run one contender."""

    contender: str
    kind: Class
    """The bits of a weight: contenders are compared within one class. 16-bit is of the checkpoint as it is, which may
    be computed in float32."""
    name: str
    """Says the settings; unique for a contender."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """For the worker's ``load``, and with ``weights`` or ``precision`` for its ``prepare``."""

    @property
    def key(self) -> str:
        """Contender and name."""
        return f"{self.contender}: {self.name}"

    @property
    def form(self) -> str:
        """The form of its weights on the disk, which variants share."""
        return str(self.settings.get("precision", self.settings.get("weights", "checkpoint")))


def _ours(kind: Class, name: str, **settings: Any) -> Variant:
    return Variant(OURS, kind, name, settings)


def _vllm(kind: Class, dtype: str) -> Variant:
    return Variant("vllm", kind, dtype, {"dtype": dtype})


def _openvino(kind: Class, weights: str, kv: str) -> Variant:
    settings = {"weights": weights, "properties": {"KV_CACHE_PRECISION": kv}}
    return Variant("openvino", kind, f"{weights} weights, {kv} KV", settings)


def _llama(kind: Class, weights: str, kv: str) -> Variant:
    return Variant("llama.cpp", kind, f"{weights} weights, {kv} KV", {"weights": weights, "kv": kv})


GRID = (
    _ours("16-bit", "bfloat16", dtype="bfloat16"),
    _ours("16-bit", "bfloat16, float32 KV", dtype="bfloat16", kv_cache_dtype="float32"),
    _ours("16-bit", "bfloat16, INT8 KV", dtype="bfloat16", kv_cache_dtype="int8"),
    _ours("16-bit", "float32", dtype="float32"),
    _vllm("16-bit", "bfloat16"),
    _vllm("16-bit", "float32"),
    _openvino("16-bit", "fp16", "u8"),
    _openvino("16-bit", "fp16", "f16"),
    _openvino("16-bit", "fp16", "f32"),
    _llama("16-bit", "bf16", "f16"),
    _llama("16-bit", "f16", "f16"),
    _llama("16-bit", "f16", "q8_0"),
    _ours("8-bit", "INT8", dtype="bfloat16", weights="int8"),
    _ours("8-bit", "INT8, INT8 KV", dtype="bfloat16", weights="int8", kv_cache_dtype="int8"),
    _openvino("8-bit", "int8", "u8"),
    _openvino("8-bit", "int8", "f16"),
    _llama("8-bit", "q8_0", "f16"),
    _llama("8-bit", "q8_0", "q8_0"),
    _ours("4-bit", "INT4", dtype="bfloat16", precision="int4-awq"),
    _ours("4-bit", "INT4, lm_head INT8", dtype="bfloat16", precision="int4-awq", weights="int8"),
    _openvino("4-bit", "int4", "u8"),
    _llama("4-bit", "q4_0", "f16"),
    _llama("4-bit", "q4_K_M", "f16"),
    _ours("MXFP4, 16-bit", "MXFP4, bfloat16", dtype="bfloat16"),
    _ours("MXFP4, 16-bit", "MXFP4, bfloat16, INT8 KV", dtype="bfloat16", kv_cache_dtype="int8"),
    _llama("MXFP4, 16-bit", "mxfp4-bf16", "f16"),
    _llama("MXFP4, 16-bit", "mxfp4-f16", "f16"),
    _ours("MXFP4, 8-bit", "MXFP4, INT8", dtype="bfloat16", weights="int8"),
    _llama("MXFP4, 8-bit", "mxfp4-q8_0", "f16"),
)
"""The engines alone. vLLM's CPU build converts no weights at load, and has no variants of fewer bits."""

SERVED = (
    _ours("16-bit", "defaults"),
    _ours("16-bit", "a thread for each core", engine={"threads": "all"}),
    _ours("8-bit", "INT8", engine={"weights": "int8"}),
    _vllm("16-bit", "bfloat16"),
    _vllm("16-bit", "float32"),
    _llama("16-bit", "f16", "f16"),
    _llama("8-bit", "q8_0", "f16"),
)
"""The servers; of ours, ``settings`` are those of a deployment. OpenVINO GenAI brings no server."""


@dataclass(frozen=True)
class Selection:
    """What is measured: variants that all of these leave."""

    contenders: Sequence[str] = tuple(WORKERS)
    kinds: Sequence[str] = PLAIN
    names: Sequence[str] = ()
    """Keys of variants; none: all."""

    def variants(self, part: Part) -> list[Variant]:
        """Return the variants of a part."""
        return [
            one
            for one in (GRID if part == "engine" else SERVED)
            if one.contender in self.contenders and one.kind in self.kinds and (not self.names or one.key in self.names)
        ]
