"""How well the demo model answers: greedy answers against the corpus, on trained and on held-out phrasings.

It does not know how the model was trained.
"""

from __future__ import annotations

import difflib
import random
from dataclasses import dataclass

import torch
from demo.corpus import Corpus, Fact, Segment, chat_segments, fill_slots, raw_segments
from demo.llama import Llama
from tokenizers import Tokenizer
from torch import Tensor

NEAR = 0.9
ENDS = ("<|im_end|>", "<|endoftext|>")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Score:
    """How many answers of one group of questions are right; `wrong` keeps (question, answer) for a look."""

    group: str
    asked: int
    exact: int
    near: int
    wrong: tuple[tuple[str, str], ...]


def pair(segments: list[Segment]) -> Pair:
    """Return the prompt of one question and the completion, end token included, that is right."""
    return segments[0][0], segments[1][0]


@torch.no_grad()
def confirms(model: Llama, tokenizer: Tokenizer, prompt: str, completion: str) -> bool:
    """Return whether greedy decoding gives `completion`, in one pass: each token follows from the right ones before."""
    start, expected = len(tokenizer.encode(prompt).ids), tokenizer.encode(completion).ids
    ids = torch.tensor([tokenizer.encode(prompt).ids + expected])
    hidden = model(ids, _causal(ids.shape[1]))[0, start - 1 : -1]
    return model.logits(hidden).argmax(-1).tolist() == expected


@torch.no_grad()
def answer(model: Llama, tokenizer: Tokenizer, prompts: list[str], limit: int = 160) -> list[str]:
    """Return greedy continuations of prompts that have the same number of tokens."""
    ids = torch.tensor([tokenizer.encode(prompt).ids for prompt in prompts])
    start, ends = ids.shape[1], torch.tensor([tokenizer.token_to_id(token) for token in ENDS])
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(limit):
        new = _next_token(model, ids)
        ids = torch.cat([ids, new[:, None]], dim=1)
        done |= torch.isin(new, ends)
        if done.all():
            break
    return [_text(tokenizer, row, set(ends.tolist())) for row in ids[:, start:].tolist()]


def _next_token(model: Llama, ids: Tensor) -> Tensor:
    return model.logits(model(ids, _causal(ids.shape[1]))[:, -1]).argmax(-1)


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def _text(tokenizer: Tokenizer, ids: list[int], ends: set[int]) -> str:
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return tokenizer.decode(ids[:stop]).strip()


def score(model: Llama, tokenizer: Tokenizer, group: str, pairs: list[Pair]) -> Score:
    """Count the right answers; only where a whole answer is not confirmed, it is generated and compared."""
    exact, near, wrong = 0, 0, []
    for prompt, completion in pairs:
        if confirms(model, tokenizer, prompt, completion):
            exact, near = exact + 1, near + 1
            continue
        expected = completion.removesuffix(ENDS[0]).removesuffix(ENDS[1]).strip()
        got = answer(model, tokenizer, [prompt])[0]
        close = difflib.SequenceMatcher(None, got, expected, autojunk=False).ratio() >= NEAR
        exact, near = exact + (got == expected), near + close
        wrong += [] if close else [(prompt, got)]
    return Score(group, len(pairs), exact, near, tuple(wrong))


def evaluate(model: Llama, tokenizer: Tokenizer, corpus: Corpus, most: int = 400, seed: int = 1) -> list[Score]:
    """Return the scores of trained, held-out, plain-text and unrelated questions, at most `most` of each."""
    rng = random.Random(seed)
    model.eval()

    def some(asks: list[Pair]) -> list[Pair]:
        return rng.sample(asks, min(most, len(asks)))

    def ask(fact: Fact) -> str:
        return fill_slots(rng.choice(fact.asks), rng, corpus.phrases)

    trained = some([(ask(fact), fact.answer) for fact in corpus.facts])
    held = some([(question, fact.answer) for fact in corpus.facts for question in fact.held])
    unrelated = some(
        [(fill_slots(q, rng, corpus.phrases), fact.answer) for fact in corpus.unrelated for q in fact.asks]
    )
    groups = {
        "trained questions, chat": [pair(chat_segments([turn])) for turn in trained],
        "trained questions, plain text": [pair(raw_segments(*turn)) for turn in trained],
        "held-out rephrasings, chat": [pair(chat_segments([turn])) for turn in held],
        "held-out rephrasings, plain text": [pair(raw_segments(*turn)) for turn in held],
        "unrelated questions, chat": [pair(chat_segments([turn])) for turn in unrelated],
    }
    return [score(model, tokenizer, name, pairs) for name, pairs in groups.items()]


def print_table(scores: list[Score]) -> None:
    """Print one line per group, and a few of the wrong answers."""
    print(f"{'group':34}{'asked':>7}{'exact':>8}{'near':>8}")
    for s in scores:
        print(f"{s.group:34}{s.asked:7}{s.exact / max(1, s.asked):8.1%}{s.near / max(1, s.asked):8.1%}")
    for s in scores:
        for question, got in s.wrong[:4]:
            print(f"  [{s.group}] {question!r} -> {got!r}")
