"""Chunked prefill: how long running streams wait while a long prompt enters (A. Agrawal et al., OSDI 2024)."""

from __future__ import annotations

import statistics

import numpy as np

from benchmarks.checkpoints import LARGE, TINY
from benchmarks.drive import Driver, ask, prompts
from benchmarks.figures import columns, curves, panels
from benchmarks.result import Result
from benchmarks.setting import Setting

_STREAMS = 8
_LONG = 2000
"""Tokens of the prompts that enter."""
_WHOLE = 4096
"""Tokens of a step: a long prompt fits, so that without chunks it is computed at once."""


def chunking(setting: Setting) -> Result:
    """Decode eight streams, let long prompts enter, one at a time, and look at the times between tokens."""
    chunks = setting.pick((32, 64, 128, 256, 512, 1024, _LONG), (128, _LONG))
    rows: list[dict[str, float]] = []
    for chunk in chunks:
        setting.say(f"chunking: chunks of {chunk:,} tokens")
        rows.append({"chunk_tokens": chunk} | _serve(setting, chunk))
    whole, best = rows[-1], min(rows[:-1], key=lambda row: row["itl_p99_ms"])
    finding = (
        f"{_STREAMS} streams decode, and prompts of {_LONG:,} tokens enter. Computed at once, such a prompt holds "
        f"every stream up: ITL p99 is {whole['itl_p99_ms']} ms. In chunks of {best['chunk_tokens']} tokens it is "
        f"{best['itl_p99_ms']} ms, and the long prompt's own first token comes after {best['ttft_ms']} ms in place "
        f"of {whole['ttft_ms']}. The smaller chunks are, the more often the weights are read for the same prompt: they "
        "stop paying where the TTFT of the long prompt is what counts."
    )
    figure, (left, right) = panels(2)
    columns_of = {"p99": "itl_p99_ms", "median": "itl_median_ms"}
    lines = {name: columns(rows, "chunk_tokens", column) for name, column in columns_of.items()}
    across = "tokens per chunk (the last: no chunks)"
    curves(left, lines, across, "ITL of running streams, ms", log_x=True)
    curves(right, {"": columns(rows, "chunk_tokens", "ttft_ms")}, across, "TTFT of the long prompt, ms", log_x=True)
    return Result("chunking", "Chunked prefill", finding, rows, figure)


def _serve(setting: Setting, chunk: int) -> dict[str, float]:
    shape = setting.pick(LARGE, TINY)
    engine = setting.engine(
        shape, 16 * 1024, prefill_chunk_tokens=chunk, max_tokens_per_step=_WHOLE, max_batch_size=16, prefix_reuse=False
    )
    driver, generator = Driver(engine), np.random.default_rng(0)
    long_prompts = prompts(generator, setting.pick(3, 1), _LONG)
    # Long enough to run all the while: a chunk takes a step, and between two prompts they run on alone.
    steps = len(long_prompts) * (-(-_LONG // chunk) + 20) + 10
    running = [driver.submit(ask(prompt, steps)) for prompt in prompts(generator, _STREAMS, 32)]
    while not all(stream.tokens for stream in running):
        driver.step()
    entered = []
    for prompt in long_prompts:
        entered.append(driver.submit(ask(prompt, 1)))
        while not entered[-1].ended:
            driver.step()
        for _ in range(10):
            driver.step()
    driver.finish()
    gaps = [1000 * gap for stream in running for gap in stream.itl_s]
    # Of the steps that a prompt has held up, and not of all: how often prompts come is not what is shown.
    waits = [1000 * gap for stream in running for gap, at in zip(stream.itl_s, stream.arrivals_s[1:], strict=True)
             if any(long.submitted_s < at <= long.arrivals_s[0] for long in entered)]  # fmt: skip
    return {
        "itl_median_ms": round(statistics.median(gaps), 2),
        "itl_p99_ms": round(float(np.percentile(waits, 99)), 2),
        "itl_longest_ms": round(max(waits), 2),
        "ttft_ms": round(1000 * statistics.median(stream.ttft_s for stream in entered), 1),
    }
