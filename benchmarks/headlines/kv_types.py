"""The KV cache in FP8 and INT8: sequences in the same bytes, quality and speed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.checkpoints import SMALL, TINY
from benchmarks.drive import Driver, ask, prompts
from benchmarks.figures import bars, panels
from benchmarks.quality import Demo, KvType
from benchmarks.result import Result, Row
from benchmarks.setting import Setting
from inflight.resources import DEMO

_TYPES: tuple[KvType, ...] = ("float32", "bfloat16", "fp8", "int8")
_OUTPUT = 32
"""Tokens of each sequence's output."""
_QUALITY_PERCENT = 1.0
"""By which perplexity may change."""
_CAVEAT = (
    "On a CPU the native step multiplies keys in INT8 as integers, and converts the other types as it reads them; "
    "where PyTorch computes, attention over FP8 and INT8 adds up in float64. On a GPU decode is bound by reading those "
    "bytes. The room and the quality are the same on both."
)


def kv_types(setting: Setting) -> Result:
    """Give each type the same bytes, see how many sequences run at once, how fast, and what the demo model loses."""
    demo = Demo(DEMO / "model", setting.pick(240, 4))
    rows: list[Row] = []
    tokens, mebibytes = setting.pick(256, 64), setting.pick(8.0, 1 / 16)
    for kv_type in _TYPES:
        setting.say(f"kv-types: {kv_type}")
        loss = demo.loss(demo.directory, kv_type)
        rows.append(
            {
                "kv_cache": kv_type,
                **_serve(setting, kv_type, tokens, int(mebibytes * 2**20)),
                "perplexity": loss.perplexity,
                "perplexity_increase_%": loss.increase_percent,
                "kl_divergence": loss.kl_divergence,
            }
        )
    figure, (left, middle, right) = panels(3)
    for axes, column, label in (
        (left, "sequences_at_once", f"sequences of {tokens} tokens in {mebibytes:g} MiB"),
        (middle, "kl_divergence", "KL divergence, nats (demo)"),
        (right, "tokens_per_s", "output tokens/s on this machine"),
    ):
        bars(axes, {str(row["kv_cache"]): {label: float(row[column])} for row in rows}, label)
        axes.tick_params(axis="x", labelsize=8)
    return Result("kv-types", "The KV cache in FP8 and INT8", _finding(rows, mebibytes), rows, figure, _CAVEAT)


def _serve(setting: Setting, kv_type: KvType, tokens: int, nbytes: int) -> dict[str, float]:
    engine = setting.engine(
        setting.pick(SMALL, TINY),
        kv_cache_bytes=nbytes,
        kv_cache_dtype=kv_type,
        max_batch_size=128,
        prefix_reuse=False,
    )
    driver, generator = Driver(engine), np.random.default_rng(0)
    requests = [ask(prompt, _OUTPUT) for prompt in prompts(generator, setting.pick(96, 16), tokens - _OUTPUT)]
    streams = [driver.submit(request) for request in requests]
    most = 0
    while engine.busy:
        driver.step()
        most = max(most, engine.stats.running_requests)
    whole = max(stream.arrivals_s[-1] for stream in streams) - streams[0].submitted_s
    return {
        "tokens_in_cache": engine.stats.state().kv_blocks_max * engine.stats.state().tokens_per_block,
        "sequences_at_once": most,
        "tokens_per_s": round(sum(len(stream.tokens) for stream in streams) / whole),
        "itl_median_ms": round(1000 * statistics.median(gap for stream in streams for gap in stream.itl_s), 2),
    }


def _finding(rows: Sequence[Row], mebibytes: float) -> str:
    by = {str(row["kv_cache"]): row for row in rows}
    half = float(by["bfloat16"]["tokens_in_cache"])
    fp8, int8 = (float(by[name]["tokens_in_cache"]) / half for name in ("fp8", "int8"))
    losses = [abs(float(by[name]["perplexity_increase_%"])) for name in ("fp8", "int8")]
    verdict = "both within" if max(losses) <= _QUALITY_PERCENT else "not both within"
    speeds = ", ".join(f"{row['tokens_per_s']:,} with {name}" for name, row in by.items())
    return (
        f"In the same {mebibytes:g} MiB, FP8 keeps {fp8:.2f} times as many tokens as bfloat16, INT8 (with a scale "
        f"for each token and head) {int8:.2f} times. The demo model's perplexity changes by "
        f"{by['fp8']['perplexity_increase_%']} % with FP8 and scales of 1, and by "
        f"{by['int8']['perplexity_increase_%']} % with INT8, {verdict} {_QUALITY_PERCENT:g} %. Output tokens per "
        f"second in these bytes are {speeds}: with a smaller type more sequences run at once, and what is quantized is "
        "decoded in each step. It stops paying where memory does not limit the batch."
    )
