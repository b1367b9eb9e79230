"""Weights in FP8, INT8 and INT4: their size, speed and quality."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.checkpoints import LARGE, TINY
from benchmarks.drive import prompts
from benchmarks.figures import bars, panels, streams_of
from benchmarks.quality import Demo
from benchmarks.quantized import quantized_checkpoint
from benchmarks.result import Result, Row
from benchmarks.setting import Setting
from benchmarks.transformers_peers import EnginePeer, Rates
from inflight.resources import DEMO

_ORIGINAL = "float32"
_PROMPT, _OUTPUT = 32, 16
_STREAMS = (1, 8)
_CAVEAT = (
    "On a CPU the native step decodes FP8 in registers, and multiplies INT8 and INT4 as integers; where PyTorch "
    "computes (`engine.cpu_step`), FP8 and INT4 are decoded for each call and are slower than float32. On a GPU decode "
    "is bound by reading the weights, and FP8 is multiplied as it is; quality is the same there."
)


def weights(setting: Setting) -> Result:
    """Quantize the demo model and a random one; size and speed of the larger, quality of the demo."""
    demo = Demo(DEMO / "model", setting.pick(240, 4))
    shape = setting.pick(LARGE, TINY)
    random = setting.checkpoint(shape)
    examples = demo.examples[: setting.pick(64, 4)]
    rows: list[Row] = []
    for precision in setting.pick((_ORIGINAL, "fp8", "int8", "int4-awq"), (_ORIGINAL, "fp8", "int8")):
        setting.say(f"weights: {precision}")
        of_demo, of_random = demo.directory, random
        if precision != _ORIGINAL:
            of_demo = quantized_checkpoint(setting.folder, demo.directory, "demo", precision, examples)
            of_random = quantized_checkpoint(setting.folder, random, random.name, precision)
        loss = demo.loss(of_demo)
        rows.append(
            {
                "weights": precision,
                "demo_MB": _megabytes(of_demo),
                "perplexity": loss.perplexity,
                "perplexity_increase_%": loss.increase_percent,
                "kl_divergence": loss.kl_divergence,
                f"{shape.name}_MB": _megabytes(of_random),
                **_speed(setting, of_random),
            }
        )
    return Result("weights", "Weights in FP8, INT8 and INT4", _finding(rows, shape.name), rows, _figure(rows), _CAVEAT)


def _megabytes(directory: Path) -> float:
    """Return the size of the weights' files."""
    return round(sum(path.stat().st_size for path in directory.glob("*.safetensors")) / 1e6, 1)


def _speed(setting: Setting, directory: Path) -> dict[str, float]:
    peer, generator = EnginePeer(setting.engine(directory, prefix_reuse=False)), np.random.default_rng(0)
    found: dict[str, float] = {}
    for streams in _STREAMS:
        rates: list[Rates] = []
        for _ in range(setting.pick(3, 1) + 1):
            rates.append(peer.run(prompts(generator, streams, _PROMPT), _OUTPUT))
        found[f"decode_tokens_per_s_{streams}_streams"] = round(statistics.median(one.decode for one in rates[1:]), 1)
        found[f"prefill_tokens_per_s_{streams}_streams"] = round(statistics.median(one.prefill for one in rates[1:]))
    return found


def _finding(rows: Sequence[Row], name: str) -> str:
    original, others = rows[0], rows[1:]
    speeds = [column for column in original if "_tokens_per_s_" in column]
    parts, faster = [], []
    for row in others:
        size = float(row[f"{name}_MB"]) / float(original[f"{name}_MB"])
        gains = {_said(column): float(row[column]) / float(original[column]) for column in speeds}
        told = ", ".join(f"{gain:.2f} in {what}" for what, gain in gains.items())
        quality = f"perplexity of the demo {float(row['perplexity_increase_%']):+.2f} %"
        parts.append(f"{row['weights']}: {size:.2f} of the size; of the speed {told}; {quality}")
        if max(gains.values()) > 1:
            faster.append(str(row["weights"]))
    return (
        f"Against float32 ({name}; embeddings and head stay as they are). {'. '.join(parts)}. Faster than float32 in "
        f"any of this: {' and '.join(faster) or 'none'}. Fewer bytes pay where memory is what is short or what takes "
        "the time; weights that must be decoded for each call cost time instead, and where arithmetic takes the time "
        "only a smaller type that the processor multiplies as it is makes it less."
    )


def _said(column: str) -> str:
    phase, _, streams = column.partition("_tokens_per_s_")
    return f"{phase} at {streams_of(int(streams.removesuffix('_streams')))}"


def _figure(rows: Sequence[Row]) -> Figure:
    figure, (left, middle, right, last) = panels(4)
    size = next(column for column in rows[0] if column.endswith("_MB") and column != "demo_MB")
    bars(left, {str(row["weights"]): {"": float(row[size])} for row in rows}, f"weights, MB ({size.partition('_')[0]})")
    quality = {str(row["weights"]): {"": float(row["kl_divergence"])} for row in rows}
    bars(middle, quality, "KL divergence, nats (demo)")
    for axes, phase in ((right, "decode"), (last, "prefill")):
        speeds = {
            str(row["weights"]): {
                streams_of(count): float(row[f"{phase}_tokens_per_s_{count}_streams"]) for count in _STREAMS
            }
            for row in rows
        }
        bars(axes, speeds, f"{phase}, tokens/s")
    for axes in figure.axes:
        axes.tick_params(axis="x", labelsize=8, rotation=30)
    return figure
