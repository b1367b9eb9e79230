"""How well the demo model answers: greedy answers against the corpus, on trained and on held-out phrasings.

It does not know how the model was trained.
"""

from __future__ import annotations

import difflib
import random
from dataclasses import dataclass

import torch
from demo.corpus import Corpus, Fact, chat_segments, fill_slots
from demo.llama import Llama
from tokenizers import Tokenizer
from torch import Tensor

NEAR = 0.9


@dataclass(frozen=True)
class Score:
    """How many answers of one group of questions are right; `wrong` keeps (question, answer) for a look."""

    group: str
    asked: int
    exact: int
    near: int
    wrong: tuple[tuple[str, str], ...]


def chat_prompt(question: str) -> str:
    """Return one question in ChatML, ready for the answer."""
    return chat_segments([(question, "")])[0][0]


@torch.no_grad()
def answer(model: Llama, tokenizer: Tokenizer, prompts: list[str], limit: int = 160) -> list[str]:
    """Return greedy continuations of prompts that have the same number of tokens."""
    ids = torch.tensor([tokenizer.encode(prompt).ids for prompt in prompts])
    start, ends = ids.shape[1], torch.tensor([tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")])
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(limit):
        new = _next_token(model, ids)
        ids = torch.cat([ids, new[:, None]], dim=1)
        done |= torch.isin(new, ends)
        if done.all():
            break
    return [_text(tokenizer, row, set(ends.tolist())) for row in ids[:, start:].tolist()]


def _next_token(model: Llama, ids: Tensor) -> Tensor:
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]
    return model.logits(model(ids, mask)[:, -1]).argmax(-1)


def _text(tokenizer: Tokenizer, ids: list[int], ends: set[int]) -> str:
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return tokenizer.decode(ids[:stop]).strip()


def score(model: Llama, tokenizer: Tokenizer, group: str, pairs: list[tuple[str, str]]) -> Score:
    """Ask every (prompt, expected answer) and count; prompts of equal length share a batch."""
    batches: dict[int, list[tuple[str, str]]] = {}
    for pair in pairs:
        batches.setdefault(len(tokenizer.encode(pair[0]).ids), []).append(pair)
    exact, near, wrong = 0, 0, []
    for batch in batches.values():
        for (prompt, expected), got in zip(batch, answer(model, tokenizer, [p for p, _ in batch]), strict=True):
            close = difflib.SequenceMatcher(None, got, expected, autojunk=False).ratio() >= NEAR
            exact, near = exact + (got == expected), near + close
            wrong += [] if close else [(prompt, got)]
    return Score(group, len(pairs), exact, near, tuple(wrong))


def evaluate(model: Llama, tokenizer: Tokenizer, corpus: Corpus, most: int = 200, seed: int = 1) -> list[Score]:
    """Return the scores of trained, held-out, plain-text and unrelated questions, at most `most` of each."""
    rng = random.Random(seed)
    model.eval()

    def some(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return rng.sample(pairs, min(most, len(pairs)))

    def ask(fact: Fact) -> str:
        return fill_slots(rng.choice(fact.asks), rng, corpus.phrases)

    trained = some([(ask(fact), fact.answer) for fact in corpus.facts])
    held = some([(question, fact.answer) for fact in corpus.facts for question in fact.held])
    unrelated = some(
        [(fill_slots(q, rng, corpus.phrases), fact.answer) for fact in corpus.unrelated for q in fact.asks]
    )
    groups = {
        "trained questions, chat": [(chat_prompt(q), a) for q, a in trained],
        "trained questions, plain text": trained,
        "held-out rephrasings, chat": [(chat_prompt(q), a) for q, a in held],
        "held-out rephrasings, plain text": held,
        "unrelated questions, chat": [(chat_prompt(q), a) for q, a in unrelated],
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
