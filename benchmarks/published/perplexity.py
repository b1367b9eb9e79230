"""Perplexity of published models on prose, by the type of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from benchmarks.published.fetched import FETCHED, MODELS, NAME, model_path
from benchmarks.published.texts import FOLDER, decisions
from benchmarks.result import Result
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.request import Request
from inflight.sampling import SamplingParams
from inflight.text.tokenizer import Tokenizer

KvType = Literal["float32", "bfloat16", "int8", "fp8"]
LENGTH = 512
"""Tokens of a piece; the first is not guessed."""


def pieces(tokenizer: Tokenizer, most: int | None = None, text: str | None = None) -> list[list[int]]:
    """Return a text, by default the decisions, in pieces of ``LENGTH`` tokens; each begins as a text, the rest is left.

    Args:
        tokenizer: of the model.
        most: how many pieces there are at most.
        text: what is read.
    """
    [begin] = tokenizer.encode_batch([""], add_special_tokens=True)
    [ids] = tokenizer.encode_batch([decisions() if text is None else text])
    step = LENGTH - len(begin)
    return [begin + ids[first : first + step] for first in range(0, len(ids) - step, step)][:most]


def scores(model: Path, kv_type: KvType, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the log-prob of each token of each prompt but the first, computed in float32 as in serving."""
    blocks = -(-(LENGTH + 1) // 16)
    config = EngineConfig(
        model, device="cpu", dtype="float32", kv_cache_dtype=kv_type, num_blocks=blocks, prefix_reuse=False
    )
    engine = Engine.load(config)
    found = []
    for prompt in prompts:
        engine.submit(Request(list(prompt), SamplingParams(1, prompt_log_probs=0)))
        while engine.busy:
            found += [output.prompt_scores.log_probs for output in engine.step() if output.prompt_scores is not None]
    return np.concatenate(found)


def perplexity(scores: np.ndarray) -> float:
    """Return the perplexity of tokens with these log-probs."""
    return math.exp(-float(scores.mean(dtype=np.float64)))


def measure(most: int | None) -> Iterator[Result]:
    """Measure each model with each type, over so many pieces.

    Raises:
        InflightError: a model cannot be fetched.
    """
    home = FETCHED.make(NAME)
    rows, losses = [], dict[str, list[float]]()
    for name in MODELS:
        path = model_path(home, name)
        prompts = pieces(Tokenizer.from_checkpoint(path), most)
        exact = np.empty(0)
        for kv_type in get_args(KvType):
            found = scores(path, kv_type, prompts)
            exact = found if kv_type == "float32" else exact
            loss = perplexity(found) / perplexity(exact) - 1
            apart = np.abs(found - exact)
            losses.setdefault(kv_type, []).append(loss)
            rows.append(
                {
                    "model": path.name,
                    "kv_cache": kv_type,
                    "tokens": len(found),
                    "perplexity": round(perplexity(found), 5),
                    "more_percent": round(100 * loss, 3),
                    "error_percent": round(100 * float((exact - found).std()) / math.sqrt(len(found)), 3),
                    "log_prob_off_by_mean": round(float(apart.mean()), 5),
                    "log_prob_off_by_p99": round(float(np.quantile(apart, 0.99)), 4),
                    "log_prob_off_by_most": round(float(apart.max()), 3),
                }
            )
    said = "; ".join(f"{kv_type} {max(loss):+.2%} at most" for kv_type, loss in losses.items() if kv_type != "float32")
    yield Result(
        "kv-types",
        "Perplexity by the type of the KV cache",
        f"Perplexity beside that of a cache in float32: {said}. The weights are those of the files, and all is "
        "computed in float32; neither model has scales for FP8, so that these are one. The error is "
        "the standard error of the difference, from that of single tokens.",
        rows,
        caveat=f"The text are the pages of {FOLDER} at this commit, in pieces of {LENGTH} tokens: English prose on one "
        "subject, and small models.",
    )
