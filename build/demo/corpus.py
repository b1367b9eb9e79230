"""The demo model's corpus: entries written by hand in `corpus/*.yaml`, turned into many examples.

An entry is one of four kinds, told apart by its first key:

    topic:     {topic, also?, plural?, is, why?, more?, ask?}  three answers, asked through templates; follow-ups
    ask:       {ask: [...], answer, held?: [...]}              one answer, asked in its own words
    unrelated: {unrelated: [...], answer}                      any question, {slots} filled, gets the one honest answer
    plain:     {plain: text}                                   running text

Held-out phrasings are never trained on and measure whether the model understands small rewordings. This module does not
know token ids or the model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from demo.conversation import Segment, segments_of

FOLDER = Path(__file__).parent / "corpus"
KINDS = {
    "topic": {"topic", "also", "plural", "is", "why", "more", "ask"},
    "ask": {"ask", "answer", "held"},
    "unrelated": {"unrelated", "answer"},
    "plain": {"plain"},
}
Turn = tuple[str, str]


@dataclass(frozen=True)
class Fact:
    """One answer and the ways to ask for it."""

    asks: tuple[str, ...]
    answer: str
    held: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topic:
    """The answers about one subject in the order in which a conversation would ask for them, follow-ups included."""

    facts: tuple[Fact, ...]
    follow_ups: tuple[tuple[str, ...], ...]


@dataclass
class Corpus:
    """Everything that the YAML files say."""

    facts: list[Fact] = field(default_factory=list)
    topics: list[Topic] = field(default_factory=list)
    unrelated: list[Fact] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    phrases: dict[str, Any] = field(default_factory=dict)


def load_corpus(folder: Path = FOLDER) -> Corpus:
    """Read every YAML file of `folder`.

    Raises:
        ValueError: an entry is of no known kind or has an unknown key, or a question has two answers.
    """
    corpus = Corpus(phrases=yaml.safe_load((folder / "_phrases.yaml").read_text(encoding="utf-8")))
    for path in sorted(folder.glob("[!_]*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            _add(corpus, entry, path.name)
    corpus.facts += _counting()
    _check_unique(corpus.facts)
    return corpus


def _check_unique(facts: list[Fact]) -> None:
    """Refuse a question that has two answers: a model cannot learn both."""
    answers: dict[str, str] = {}
    for fact in facts:
        for ask in (*fact.asks, *fact.held):
            if answers.setdefault(ask.lower().rstrip("?.! "), fact.answer) != fact.answer:
                raise ValueError(f"{ask!r} has two answers")


def _add(corpus: Corpus, entry: dict[str, Any], where: str) -> None:
    kind = next(iter(entry))
    if kind not in KINDS or not set(entry) <= KINDS[kind]:
        raise ValueError(f"{where}: {entry!r:.80} has a kind or a key other than {KINDS.get(kind, set(KINDS))}")
    if kind == "topic":
        topic = _topic(entry, corpus.phrases)
        corpus.topics.append(topic)
        corpus.facts += topic.facts
        corpus.plain.append(" ".join(fact.answer for fact in topic.facts))
    elif kind == "ask":
        corpus.facts.append(Fact(tuple(entry["ask"]), entry["answer"].strip(), tuple(entry.get("held", ()))))
    elif kind == "unrelated":
        corpus.unrelated.append(Fact(tuple(entry["unrelated"]), entry["answer"].strip()))
    else:
        corpus.plain.append(entry["plain"].strip())


def _topic(entry: dict[str, Any], phrases: dict[str, Any]) -> Topic:
    names = [entry["topic"], *entry.get("also", [])]
    bare = [name.split(" ", 1)[1] for name in names if name.split(" ")[0] in ("a", "an", "the")]
    names = list(dict.fromkeys(names + bare))
    facts, follow_ups = [], []
    for part in ("is", "why", "more"):
        if part in entry:
            asks = [_fill(t, name, entry) for t in phrases[part]["asks"] for name in names]
            asks += entry.get("ask", []) if part == "is" else []
            held = tuple(_fill(t, names[0], entry) for t in phrases[part]["held"])
            facts.append(Fact(tuple(asks), entry[part].strip(), held))
            follow_ups.append(tuple(phrases[part].get("next", ())))
    return Topic(tuple(facts), tuple(follow_ups))


def _fill(template: str, name: str, entry: dict[str, Any]) -> str:
    verbs = ("are", "do") if entry.get("plural") else ("is", "does")
    text = template.format(t=name, be=verbs[0], does=verbs[1])
    return text[0].upper() + text[1:]


def _counting() -> list[Fact]:
    words = "one two three four five six seven eight nine ten eleven twelve".split()
    facts = [
        Fact(
            (f"Count from 1 to {n}.", f"Count to {n}", f"Can you count to {n}?", f"Please count from one to {n}."),
            ", ".join(map(str, range(1, n + 1))) + ".",
            (f"Could you count up to {n}?",),
        )
        for n in (3, 5, 10, 12, 15, 20, 25, 30, 40)
    ]
    for n in (5, 10):
        asks = (f"Count down from {n}.", f"Count backwards from {n} to 1", f"Count from {n} down to 1")
        facts.append(Fact(asks, ", ".join(map(str, range(n, 0, -1))) + "."))
    asks = ("Count from one to ten in words.", "Count to ten in words", "Write the numbers from one to ten.")
    return [*facts, Fact(asks, ", ".join(words[:10]) + ".")]


def vary(question: str, rng: random.Random, phrases: dict[str, Any]) -> str:
    """Return `question` as a hurried or a polite person might type it."""
    if rng.random() < 0.15:
        question = rng.choice(phrases["before"]) + question
    if rng.random() < 0.35:
        question = question.rstrip("?.! ")
    if rng.random() < 0.07:
        question += rng.choice(phrases["after"])
    if rng.random() < 0.3:
        question = question.lower()
    if rng.random() < 0.1:
        question = question.replace("-", " ")
    if rng.random() < 0.12:
        question = _mistype(question, rng)
    return question


def _mistype(text: str, rng: random.Random) -> str:
    """Swap or drop one letter inside a word."""
    at = rng.randrange(1, max(2, len(text) - 2))
    if not text[at : at + 2].isalpha() or len(text) < 8:
        return text
    return text[:at] + rng.choice([text[at + 1] + text[at], text[at]]) + text[at + 2 :]


def fill_slots(question: str, rng: random.Random, phrases: dict[str, Any]) -> str:
    """Put a word of its list into each {slot} of an unrelated question."""
    if "{" not in question:
        return question
    return question.format(**{name: rng.choice(words) for name, words in phrases["slots"].items()})


def chat_segments(turns: list[Turn], system: str | None = None) -> list[Segment]:
    """Return the conversation in ChatML as (text, is trained on) pairs: the model learns the answers alone."""
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return segments_of(messages)


def raw_segments(question: str, answer: str) -> list[Segment]:
    """Return a question as plain text and its answer on the next line: what a client without a template sends."""
    if question.endswith("\n"):
        return [(question, False), (f"{answer}<|endoftext|>", True)]
    return [(question, False), (f"\n{answer}<|endoftext|>", True)]


def examples(corpus: Corpus, rng: random.Random) -> Iterator[list[Segment]]:
    """Yield one epoch: every fact asked twice in chat and once as plain text, in new words each time, and the rest."""
    phrases = corpus.phrases

    def turn(fact: Fact) -> Turn:
        return vary(fill_slots(rng.choice(fact.asks), rng, phrases), rng, phrases), fact.answer

    def system() -> str | None:
        return rng.choice(phrases["system"]) if rng.random() < 0.25 else None

    def any_fact() -> Fact:
        return rng.choice(corpus.unrelated if rng.random() < 0.2 else corpus.facts)

    for fact in corpus.facts:
        for _ in range(2):
            yield chat_segments([turn(fact)], system())
        question, answer = turn(fact)
        yield raw_segments(question + ("\n" if rng.random() < 0.2 else ""), answer)
    for topic in corpus.topics:
        lead = [turn(any_fact())] if rng.random() < 0.3 else []
        yield chat_segments(lead + _conversation(topic, turn(topic.facts[0]), rng, phrases), system())
        turns = rng.randint(6, 14) if rng.random() < 0.1 else rng.randint(2, 5)
        yield chat_segments([turn(any_fact()) for _ in range(turns)], system())
    for fact in corpus.unrelated:
        for _ in range(2 * len(fact.asks)):
            yield chat_segments([turn(fact)], system())
        for _ in range(len(fact.asks)):
            yield raw_segments(*turn(fact))
    for text in corpus.plain:
        yield [(f"{text}<|endoftext|>", True)]


def _conversation(topic: Topic, first: Turn, rng: random.Random, phrases: dict[str, Any]) -> list[Turn]:
    """Return a first question and its follow-ups, some left out, until there is no more to tell."""
    turns = [first]
    for fact, asks in list(zip(topic.facts, topic.follow_ups, strict=True))[1:]:
        if rng.random() < 0.75:
            turns.append((vary(rng.choice(asks), rng, phrases), fact.answer))
    if len(turns) == len(topic.facts) and rng.random() < 0.5:
        turns.append((rng.choice(phrases["more"]["next"]), phrases["exhausted"]))
    return turns
