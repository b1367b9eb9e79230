"""Greedy tokens and log-probs of published models are those of a reference in numpy that shares no code with ours."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.environments import Home
from benchmarks.published.fetched import model_path
from benchmarks.published.texts import decisions
from inflight.engine.engine import Engine
from inflight.engine.native.bindings import instruction_sets
from inflight.text.tokenizer import Tokenizer
from tests.engine.support.driving import ask, load, run
from tests.published.support.reference import Reference

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "Die Sonne geht im Osten auf und",
    "1 2 3 5 8 13",
    "Licensed under the Apache License, Version 2.0",
    '{"name": "Ada", "born": 1815, "died":',
    "Q: What is the boiling point of water?\nA:",
    "SELECT name, count(*) FROM",
    "<html>\n  <body>\n    <h1>",
    "The quick brown fox",
    "import numpy as np\n\n",
    "Dear Sir or Madam,\n\n",
    "Il était une fois",
    "# Installation\n\n1. ",
    "<|im_start|>user\nWho wrote Hamlet?<|im_end|>\n<|im_start|>assistant\n",
)
COUNT = 16
LARGEST, USUAL = 2e-3, 3e-4
"""Of an error of log-probs, and of its mean: the native step rounds the inputs of quantized products to 16 bits."""
UNROUNDED = 2e-4
"""The largest where PyTorch computes with the decoded weights: both add up in float32, in another order."""
LONG = {"smollm2": (600, 7_900), "gemma3": (1_300, 6_000)}
"""Tokens of a text, of which the longer is left to a release: more than two of Gemma's windows, and nearly all of
SmolLM2's context."""


@pytest.fixture(scope="module")
def tokenizer(home: Home, model: str) -> Tokenizer:
    return Tokenizer.from_checkpoint(model_path(home, model))


@pytest.fixture(scope="module")
def engine(home: Home, model: str, tokenizer: Tokenizer) -> Engine:
    return load(model_path(home, model), tokenizer, block_size=16, num_blocks=512)


def _errors(engine: Engine, tokenizer: Tokenizer, reference: Reference, *texts: str) -> np.ndarray:
    """Check greedy tokens; return by how much their log-probs are off."""
    prompts = tokenizer.encode_batch(texts, add_special_tokens=True)
    requests = [ask(prompt, COUNT, log_probs=True, ignore_eos=True) for prompt in prompts]
    outputs = run(engine, requests)
    errors = []
    for request in requests:
        output = outputs[request.key]
        expected = reference.log_probs([*request.prompt, *output.tokens[:-1]], len(request.prompt) - 1)
        assert output.tokens == expected.argmax(-1).tolist(), tokenizer.decode(request.prompt)
        errors.append(output.log_probs - expected.max(-1))
    return np.abs(errors)


@pytest.mark.parametrize("chosen", instruction_sets())
def test_tokens_and_log_probs(home: Home, model: str, tokenizer: Tokenizer, reference: Reference, chosen: str) -> None:
    engine = load(model_path(home, model), tokenizer, block_size=16, cpu_step=chosen)
    errors = _errors(engine, tokenizer, reference, *PROMPTS)
    assert errors.max() <= LARGEST
    assert errors.mean() <= USUAL


def test_pytorch_rounds_nothing(home: Home, model: str, tokenizer: Tokenizer, reference: Reference) -> None:
    engine = load(model_path(home, model), tokenizer, block_size=16, cpu_step="pytorch")
    assert _errors(engine, tokenizer, reference, PROMPTS[0], PROMPTS[5]).max() <= UNROUNDED


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.release)])
def test_each_token_of_a_long_text(
    engine: Engine, tokenizer: Tokenizer, reference: Reference, model: str, place: int
) -> None:
    """Beyond Gemma's windows, in chunks."""
    [prompt] = tokenizer.encode_batch([decisions()], add_special_tokens=True)
    request = ask(prompt[: LONG[model][place]], 1, prompt_log_probs=0)
    scores = run(engine, [request])[request.key].prompt_scores
    assert scores is not None
    errors = np.abs(np.array(scores.log_probs) - reference.scores(request.prompt))
    assert errors.max() <= 4 * LARGEST, "tokens that nobody would have guessed are off by more"
    assert errors.mean() <= USUAL
