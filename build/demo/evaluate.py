"""How well the demo model answers: greedy answers to questions of its corpus, to questions with tools, and as JSON.

What counts as near depends on the group: of a text, that it is nearly the same; of calls, that the right functions are
called and nothing else; where no tool fits, that none is called; of JSON, that it parses and has the right keys. It
does not know how the model was trained.
"""

from __future__ import annotations

import difflib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from demo.conversation import Message, Segment, segments_of
from demo.corpus import Fact, chat_segments, fill_slots, raw_segments
from demo.lessons import Lessons
from demo.llama import Llama
from demo.structured import thoughtful
from demo.tools import Asked, Defined
from tokenizers import Tokenizer
from torch import Tensor

NEAR = 0.9
ENDS = ("<|im_end|>", "<|endoftext|>")
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
Pair = tuple[str, str]
Near = Callable[[str, str], bool]
Group = tuple[str, list[Pair], Near]


@dataclass(frozen=True)
class Score:
    """How many answers of one group of questions are right; `wrong` keeps (question, answer) for a look."""

    group: str
    asked: int
    exact: int
    near: int
    wrong: tuple[tuple[str, str], ...]


def pair(segments: list[Segment]) -> Pair:
    """Return the prompt of the last answer and the completion, end token included, that is right."""
    trained = [at for at, (_, is_trained) in enumerate(segments) if is_trained]
    return "".join(text for text, _ in segments[: trained[-1]]), segments[trained[-1]][0]


def near_text(got: str, expected: str) -> bool:
    """Return whether two texts are nearly the same."""
    return difflib.SequenceMatcher(None, got, expected, autojunk=False).ratio() >= NEAR


def near_calls(got: str, expected: str) -> bool:
    """Return whether the answer is calls of the functions that are expected, with arguments that are JSON."""
    try:
        called, wanted = ([json.loads(call)["name"] for call in CALL.findall(text)] for text in (got, expected))
    except (ValueError, KeyError, TypeError):
        return False
    return called == wanted and not CALL.sub("", got).strip()


def no_call(got: str, expected: str) -> bool:
    """Return whether the answer is text alone."""
    return "<tool_call>" not in got and "<tool_call>" not in expected


def near_json(got: str, expected: str) -> bool:
    """Return whether the answer is JSON with the keys that are expected."""
    try:
        return list(json.loads(got)) == list(json.loads(expected))
    except (ValueError, TypeError):
        return False


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


def score(model: Llama, tokenizer: Tokenizer, group: str, pairs: list[Pair], is_near: Near = near_text) -> Score:
    """Count the right answers; only where a whole answer is not confirmed, it is generated and compared."""
    exact, near, wrong = 0, 0, []
    for prompt, completion in pairs:
        if confirms(model, tokenizer, prompt, completion):
            exact, near = exact + 1, near + 1
            continue
        expected = completion.removesuffix(ENDS[0]).removesuffix(ENDS[1]).strip()
        got = answer(model, tokenizer, [prompt])[0]
        close = is_near(got, expected)
        exact, near = exact + (got == expected), near + close
        wrong += [] if close else [(prompt, got)]
    return Score(group, len(pairs), exact, near, tuple(wrong))


def evaluate(model: Llama, tokenizer: Tokenizer, lessons: Lessons, most: int = 400, seed: int = 1) -> list[Score]:
    """Return the scores of each group of questions, at most `most` of each; a quarter of them of those with tools."""
    model.eval()
    groups: list[Group] = [(name, pairs, near_text) for name, pairs in of_corpus(lessons, most, seed).items()]
    groups += of_tools(lessons, most // 4, seed)
    return [score(model, tokenizer, *group) for group in groups]


def of_corpus(lessons: Lessons, most: int, seed: int) -> dict[str, list[Pair]]:
    """Return trained, held-out, plain-text and unrelated questions."""
    rng, corpus = random.Random(seed), lessons.corpus

    def some(asks: list[Pair]) -> list[Pair]:
        return rng.sample(asks, min(most, len(asks)))

    def ask(fact: Fact) -> str:
        return fill_slots(rng.choice(fact.asks), rng, corpus.phrases)

    trained = some([(ask(fact), fact.answer) for fact in corpus.facts])
    held = some([(question, fact.answer) for fact in corpus.facts for question in fact.held])
    unrelated = some(
        [(fill_slots(q, rng, corpus.phrases), fact.answer) for fact in corpus.unrelated for q in fact.asks]
    )
    return {
        "trained questions, chat": [pair(chat_segments([turn])) for turn in trained],
        "trained questions, plain text": [pair(raw_segments(*turn)) for turn in trained],
        "held-out rephrasings, chat": [pair(chat_segments([turn])) for turn in held],
        "held-out rephrasings, plain text": [pair(raw_segments(*turn)) for turn in held],
        "unrelated questions, chat": [pair(chat_segments([turn])) for turn in unrelated],
    }


def of_tools(lessons: Lessons, count: int, seed: int) -> list[Group]:
    """Return questions with tools, and for JSON; words, names and tools in them are combined anew."""
    rng, talk = random.Random(seed), lessons.tools

    def asked(kind: Callable[[list[Defined], random.Random], Asked], after: bool = False) -> Pair:
        tools, messages = talk.define(rng, rng.randint(1, 3)), list[Message]()
        talk.add_turn(messages, kind(tools, rng), rng, stop_at_call=False)
        return pair(segments_of(messages if after else messages[:2], [tool.definition for tool in tools]))

    def many(write: Callable[[], Pair]) -> list[Pair]:
        return [write() for _ in range(count)]

    return [
        ("tools: one call", many(lambda: asked(talk.one)), near_calls),
        ("tools: two calls at once", many(lambda: asked(talk.two)), near_calls),
        ("tools: none fits", many(lambda: asked(talk.none)), no_call),
        ("tools: answer from a result", many(lambda: asked(talk.one, after=True)), near_text),
        ("JSON", many(lambda: pair(lessons.json.example(rng))), near_json),
        ("thought before the answer", many(lambda: pair(thoughtful(lessons.corpus, rng))), near_text),
    ]


def print_table(scores: list[Score]) -> None:
    """Print one line per group, and a few of the wrong answers."""
    print(f"{'group':34}{'asked':>7}{'exact':>8}{'near':>8}")
    for s in scores:
        print(f"{s.group:34}{s.asked:7}{s.exact / max(1, s.asked):8.1%}{s.near / max(1, s.asked):8.1%}")
    for s in scores:
        for question, got in s.wrong[:4]:
            print(f"  [{s.group}] {question!r} -> {got!r}")
