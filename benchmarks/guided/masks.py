"""What guided decoding costs: the masks of a step alone, and their share of the steps of an engine."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
from llguidance import LLMatcher, LLParserLimits
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.result import Result
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.guided import masks
from inflight.engine.guided.compiler import CompiledGuide
from inflight.engine.guided.grammar import Grammars
from inflight.engine.guided.state import GuideState
from inflight.engine.guided.vocabulary import Vocabulary
from inflight.engine.request import Request
from inflight.resources import DEMO
from inflight.sampling import Guide, SamplingParams
from inflight.text.checkpoint import TextConfig
from inflight.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["person", "place", "organization", "event"]},
        "born": {"type": "string", "format": "date"},
        "score": {"type": "number", "minimum": 0, "maximum": 100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 200},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "notes": {"type": ["string", "null"], "maxLength": 4000},
    },
    "required": ["name", "kind", "born", "score", "tags", "address", "notes"],
    "additionalProperties": False,
}
_GUIDE = Guide("json_schema", json.dumps(SCHEMA))
_WORDS = (
    "paged cache blocks hold keys and values of many tokens, which sequences share where their prefix agrees".split()
)
STREAMS = (1, 8, 32)
_LARGE_VOCABULARY = 128_256
_STEPS = 300


def synthetic_tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of ``size`` tokens: all bytes, then words, numbers and punctuation made at random."""
    source, alphabet = random.Random(1), sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys(alphabet)
    letters, marks = "etaoinshrdlucmfwypvbgkjqxz", '{}[]":,.\\/()<>=+-*#_!?;'
    while len(pieces) < size - 1:
        kind = source.random()
        if kind < 0.9:
            stem = "".join(source.choices(letters, range(26, 0, -1), k=source.randrange(2, 11)))
            piece = source.choice(["", "Ġ"]) + (stem.capitalize() if source.random() < 0.2 else stem)
        elif kind < 0.95:
            piece = str(source.randrange(1000))
        else:
            piece = "".join(source.choices(marks + "ĠĊ", k=source.randrange(2, 6)))
        pieces[piece] = None
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: place for place, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, TextConfig(size, frozenset({size - 1}), None, {}, None))


def measure_masks() -> Iterator[Result]:
    """Yield the time of a step's masks, by vocabulary and streams."""
    rows: list[dict[str, float | str]] = []
    made: dict[str, Callable[[], Tokenizer]] = {
        "demo": lambda: Tokenizer.from_checkpoint(DEMO / "model"),
        "synthetic": lambda: synthetic_tokenizer(_LARGE_VOCABULARY),
    }
    for name, make in made.items():
        tokenizer = make()
        started = time.perf_counter()
        vocabulary = Vocabulary(tokenizer, tokenizer.config.vocab_size)
        built = time.perf_counter() - started
        started = time.perf_counter()
        grammar = Grammars(vocabulary.tokens, LLParserLimits()).of(_GUIDE)
        compiled = CompiledGuide(LLMatcher(vocabulary.tokens, grammar, log_level=0), vocabulary)
        compile_s = time.perf_counter() - started
        for streams in STREAMS:
            row: dict[str, float | str] = {"vocabulary": name, "tokens": vocabulary.size, "streams": streams}
            row |= _percentiles(compiled, tokenizer, streams)
            rows.append(row | {"trie built [ms]": built * 1e3, "guide compiled [ms]": compile_s * 1e3})
    finding = (
        f"{_STEPS} steps of sequences that write objects of one schema, each at a place of its own. Masks: the allowed "
        "tokens as bits. Applied: set in float32 logits. Taken over: the sampled tokens."
    )
    yield Result("masks", "The masks of a step", finding, rows)


def _percentiles(compiled: CompiledGuide, tokenizer: Tokenizer, streams: int) -> dict[str, float | str]:
    sampling = SamplingParams(10_000, guide=_GUIDE, end_ids=tokenizer.config.end_ids)
    logits = torch.zeros(streams, compiled.vocabulary.size)
    tokens = [tokenizer.spelling(_instance(place)) for place in range(streams)]
    states, places = [GuideState(compiled, sampling) for _ in range(streams)], [0] * streams
    for place, state in enumerate(states):  # so that they are at different places
        places[place] = 7 * place % len(tokens[place])
        for token in tokens[place][: places[place]]:
            state.push(token)
    spent: list[tuple[float, float, float]] = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        masks.next_masks(states)
        masked = time.perf_counter()
        masks.mask_logits(logits, states)
        applied = time.perf_counter() - masked
        pushed = time.perf_counter()
        for place, state in enumerate(states):
            state.push(tokens[place][places[place]])
        spent.append((masked - began, applied, time.perf_counter() - pushed))
        places = [(place + 1) % len(tokens[row]) for row, place in enumerate(places)]
        states = [state if places[row] else GuideState(compiled, sampling) for row, state in enumerate(states)]
    found: dict[str, float | str] = {}
    for name, column in zip(("masks", "masks and applied", "taken over"), zip(*spent, strict=True), strict=True):
        p50, p99 = np.percentile(column, [50, 99]) * 1e3
        found |= {f"{name} p50 [ms]": float(p50), f"{name} p99 [ms]": float(p99)}
    return found


def _instance(place: int) -> str:
    source = random.Random(place)
    words = lambda count: " ".join(source.choices(_WORDS, k=count))  # noqa: E731
    instance = {
        "name": words(3), "kind": "place", "born": "1999-12-31", "score": round(source.uniform(0, 100), 2),
        "tags": [words(2)[:40] for _ in range(6)],
        "address": {"street": words(2), "number": source.randrange(999), "city": words(1)}, "notes": words(20),
    }  # fmt: skip
    return json.dumps(instance)


def measure_shares(checkpoints: Path, rounds: int = 3) -> Iterator[Result]:
    """Yield the share of the masks in the steps of engines, with as many streams as ``STREAMS`` says."""
    rows: list[dict[str, float | str]] = []
    for name, model, tokenizer in _models(checkpoints):
        config = EngineConfig(model, device="cpu", dtype="float32", num_blocks=4096, max_tokens_per_step=2048)
        engine = Engine.load(config, tokenizer)
        engine.warm_up()
        for streams in STREAMS:
            # Guided and free rounds take turns, so that what else the machine does slows both.
            pairs = [[_steps(engine, tokenizer, streams, guided) for guided in (True, False)] for _ in range(rounds)]
            best, free = min(pair[0] for pair in pairs), min(pair[1][0] for pair in pairs)
            ratio = float(np.median([guided[0] / free[0] for guided, free in pairs]))
            rows.append({
                "model": name, "streams": streams, "step, guided p50 [ms]": best[0] * 1e3,
                "step, free p50 [ms]": free * 1e3, "guided / free": ratio, "masks, CPU p50 [ms]": best[1] * 1e3,
                "masks [% of the fastest guided step]": 100 * best[1] / best[2],
            })  # fmt: skip
    finding = (
        "Steps that decode, of engines whose requests all have a guide, or none: the best of some rounds, and the "
        "median of the ratios of a guided round and the free one behind it. The masks' time is that of their one "
        "thread on the CPU."
    )
    yield Result("shares", "The share of masks in a step", finding, rows)


def _models(checkpoints: Path) -> Iterator[tuple[str, Path, Tokenizer]]:
    yield "demo", DEMO / "model", Tokenizer.from_checkpoint(DEMO / "model")
    shape = SHAPES["125M"]
    yield "125M", checkpoint(shape, checkpoints), synthetic_tokenizer(shape.vocab)


def _steps(
    engine: Engine, tokenizer: Tokenizer, streams: int, guided: bool, tokens: int = 64
) -> tuple[float, float, float]:
    """Return the p50 of a decoding step's seconds, that of its masks' CPU time, and the fastest step's seconds."""
    guide = _GUIDE if guided else None
    for seed in range(streams):
        sampling = SamplingParams(tokens, temperature=1.0, seed=seed, guide=guide, ignore_eos=True)
        engine.submit(Request([(7 * seed + place) % 4000 for place in range(16)], sampling))
    spent, parts, inner = list[float](), list[float](), masks.mask_logits

    def timed(logits: Tensor, guides: Sequence[GuideState | None]) -> None:
        began = time.thread_time()  # what else runs on the machine is not the masks' cost
        inner(logits, guides)
        parts.append(time.thread_time() - began)

    masks.mask_logits = timed
    try:
        while engine.busy:
            before = len(parts)
            began = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - began
            if len(outputs) == streams and (len(parts) > before or not guided):
                spent.append(seconds)
            else:
                del parts[before:]
    finally:
        masks.mask_logits = inner
    spent, parts = spent[1:], parts[1:] or [0.0]  # the first ones have the prompts
    return float(np.median(spent)), float(np.median(parts)), min(spent)
