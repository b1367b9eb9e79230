"""Builds a published model in each precision: what it loses on held-out prose, what its build says, how fast it is."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import yaml

from benchmarks.planned import compare, compared
from benchmarks.published.fetched import FETCHED, NAME, model_path
from benchmarks.published.perplexity import KvType, perplexity, pieces, scores
from benchmarks.published.texts import held_out
from benchmarks.published.unquantized import write_checkpoint
from benchmarks.result import Result, Row
from inflight.errors import InflightError
from inflight.export.quantize.modelopt import SCHEMES
from inflight.text.tokenizer import Tokenizer

PRECISIONS = ("float32", "bf16", "int8", "fp8", "int4-awq")
_LENIENT = {
    "quality": {"max_perplexity_increase": 9, "max_kl_divergence": 9, "max_weight_error": 9}
    | dict.fromkeys(("min_range", "min_exact_match", "min_long_context_recall"), 0)
}
_LOAD = ("--input-tokens", "512", "--output-tokens", "64")
_PIECES = 20


def measure_builds() -> Iterator[Result]:
    """Build SmolLM2 in each precision, and yield a row for each.

    Raises:
        InflightError: the model cannot be fetched, or a build fails for another reason than its quality.
    """
    gguf = model_path(FETCHED.make(NAME), "smollm2")
    with TemporaryDirectory(prefix="inflight-builds-") as folder:
        original = Path(folder) / "smollm2"
        write_checkpoint(gguf, original)
        prompts = pieces(Tokenizer.from_checkpoint(original), _PIECES, held_out())
        exact = scores(original, "float32", prompts)
        rows: list[Row] = []
        served: list[Row] = []
        for precision in PRECISIONS:
            row, *of_plan = _measure(original, precision, prompts, exact)
            rows.append(row)
            served += of_plan
            yield _builds(rows)
            yield compared(served)


def _builds(rows: Sequence[Row]) -> Result:
    passed = [str(row["precision"]) for row in rows if row["verdict"] == "passes"]
    return Result(
        "builds",
        "Builds of SmolLM2-135M-Instruct by precision",
        f"Builds that hold their limits (0.5 % of perplexity for 8 bits, 3 % for 4): {', '.join(passed)}. Perplexity "
        f"is that of {rows[0]['tokens']:,} tokens of held-out prose, computed in float32 with the deployment's weights "
        "and type of KV cache, beside float32 throughout; the error is the standard error of the difference. The "
        "verdict is the build's own, on its default data; a refused one was built again with lenient limits, to be "
        "served. A build's seconds have what its layers cost where it is refused, and the first has the measuring of "
        "the machine.",
        rows,
        caveat="A small model loses more than a large one. The file that these weights come from has 4 bits by groups "
        "of 32, with minimums; AWQ's INT4, which has none, rounds them once more.",
    )


def _measure(original: Path, precision: str, prompts: Sequence[Sequence[int]], exact: np.ndarray) -> Iterator[Row]:
    """Yield the row of a precision, and the rows of its plan beside what is served."""
    work, deployment = original.parent / "work", original.parent / precision
    began = time.monotonic()
    verdict = _build(original, precision, work, deployment, None)
    seconds = time.monotonic() - began
    if not deployment.is_dir():
        lenient = original.parent / "lenient.yaml"
        lenient.write_text(yaml.safe_dump(_LENIENT))
        if (lost := _build(original, precision, work, deployment, lenient)) != "passes":
            raise InflightError(f"{precision} is not served: with lenient limits too it is {lost}")
    kv_type: KvType = "fp8" if precision == "fp8" else "float32" if precision == "float32" else "bfloat16"
    found = scores(deployment / "model", kv_type, prompts)
    weights = sum(file.stat().st_size for file in deployment.glob("model/*.safetensors"))
    of_plan = list(compare(deployment))
    yield {
        "precision": precision,
        "weights, MB": round(weights / 1e6, 1),
        "KV cache": kv_type,
        "tokens": len(found),
        "perplexity": round(perplexity(found), 4),
        "more, %": round(100 * (perplexity(found) / perplexity(exact) - 1), 3),
        "error, %": round(100 * float((exact - found).std()) / math.sqrt(len(found)), 3),
        "verdict": verdict,
        "build, s": round(seconds),
        "tokens/s, 1 stream": of_plan[0]["tokens/s served"],
        "tokens/s, full batch": of_plan[1]["tokens/s served"],
    }
    yield from of_plan
    shutil.rmtree(deployment)


def _build(original: Path, precision: str, work: Path, deployment: Path, settings: Path | None) -> str:
    """Build, with the build's progress on the terminal, and return its verdict."""
    command = [sys.executable, "-m", "inflight", "build", "--model", str(original), "--gpu", "cpu", *_LOAD]
    command += ["--precision", precision, "--work", str(work), "--output", str(deployment)]
    if settings is not None:
        command += ["--settings", str(settings)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None, "it is a pipe"
        lines = [line for line in process.stderr if sys.stderr.write(line)]
    if process.returncode == 0:
        return "passes" if precision in SCHEMES else "not quantized"
    last = next((line for line in reversed(lines) if line.strip()), "")
    if "falls short" not in last:
        raise InflightError(f"{' '.join(command)}: {last.strip()}")
    return f"refused: {last.partition('falls short: ')[2].partition('. ')[0]}"
