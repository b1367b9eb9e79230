"""The demo model in FP8 with an FP8 KV cache still gives the answers it was trained on."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from inflight.engine.engine import Engine
from inflight.engine.scoring import Scorer
from tests.engine.support.driving import ask, load, run
from tests.engine.support.quantized import CONFIGS, quantize

DEMO = Path(__file__).parents[2] / "deployments/demo/model"
ANSWER_TOKENS = 160
QUESTIONS = (
    "What is in-flight batching?",
    "What is a paged KV cache?",
    "What is TTFT?",
    "What is prefix reuse?",
    "What is chunked prefill?",
    "What is Triton Inference Server?",
    "What is an ensemble?",
    "What does the tokenizer stage do?",
)


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def _prompt(question: str) -> list[int]:
    ids: list[int] = _tokenizer().encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
    return ids


def _answers(engine: Engine) -> list[list[int]]:
    end = frozenset({_tokenizer().token_to_id("<|im_end|>")})
    requests = [ask(_prompt(question), ANSWER_TOKENS, end_ids=end) for question in QUESTIONS]
    outputs = run(engine, requests)
    return [outputs[request.key].tokens for request in requests]


@functools.cache
def _original() -> list[list[int]]:
    return _answers(load(DEMO, block_size=16))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrated on the answers themselves, with scales as they come."""
    directory = tmp_path_factory.mktemp("demo-fp8")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    texts = [_prompt(question) + answer for question, answer in zip(QUESTIONS, _original(), strict=True)]
    quantize(model, CONFIGS["FP8"], directory, texts, fp8_kv_cache=True, round_scales=False)
    return directory


@pytest.mark.proof
def test_answers_stay(checkpoint: Path) -> None:
    answers = _answers(load(checkpoint, block_size=16))
    same = sum(ours == theirs for ours, theirs in zip(answers, _original(), strict=True))
    assert same >= len(QUESTIONS) - 1
    text = _tokenizer().decode(answers[0])
    assert "batch" in text.lower()
    assert len(text) > 40


@pytest.mark.proof
def test_the_served_type_is_as_good(checkpoint: Path) -> None:
    """The next token is the original's at nearly every place of its own answers."""
    original, scorer = Scorer(DEMO, "float32", device="cpu"), Scorer(checkpoint, "bfloat16", device="cpu")
    places = same = 0
    for question, answer in zip(QUESTIONS, _original(), strict=True):
        tokens = _prompt(question) + answer
        best = original.logits(tokens).argmax(-1) == scorer.logits(tokens).argmax(-1)
        places, same = places + len(answer), same + int(best[-len(answer) - 1 : -1].sum())
    assert same / places > 0.98


@pytest.mark.proof
def test_it_is_smaller(checkpoint: Path) -> None:
    """Embeddings stay as they are; of the rest a half is left."""
    original, smaller = (Scorer(directory, "bfloat16", device="cpu") for directory in (DEMO, checkpoint))
    embeddings = original.weight("lm_head").numel() * 2
    assert (smaller.nbytes - embeddings) / (original.nbytes - embeddings) < 0.52
