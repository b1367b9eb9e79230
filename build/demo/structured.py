"""Questions that ask for JSON, and short thoughts before an answer. It does not know token ids or the model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from demo.conversation import Segment, segments_of, to_json
from demo.corpus import Corpus, fill_slots
from demo.values import Values, listed

KNOWN, UNKNOWN = "They ask about LLM serving. I know this.", "They ask about something else. I do not know it."


class JsonTalk:
    """Writes questions whose answer is JSON."""

    def __init__(self, corpus: Corpus, words: Mapping[str, Any], values: Values) -> None:
        self._corpus = corpus
        self._words = words
        self._values = values

    def example(self, rng: random.Random) -> list[Segment]:
        """Return one question and its answer."""
        kinds = [self.an_object, self.listed, self.steps, self.fact]
        question, answer = rng.choices(kinds, [50, 30, 12, 8])[0](rng)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if rng.random() < 0.2:
            messages.insert(0, {"role": "system", "content": rng.choice(self._words["json_asks"])})
        return segments_of(messages, thought="The answer is JSON." if rng.random() < 0.1 else "")

    def an_object(self, rng: random.Random) -> tuple[str, str]:
        """Return a text and the object that it describes."""
        entry = rng.choice(self._words["objects"])
        known = {key: self._values.pick(kind, rng) for key, kind in entry["keys"].items()}
        said = self._values.fill(rng.choice(entry["says"]), known, rng)
        ask = rng.choice([*entry["asks"], rng.choice(self._words["json_asks"])])
        return self._asked(said, ask, known, rng), to_json(known)

    def listed(self, rng: random.Random) -> tuple[str, str]:
        """Return keys and values in a random order, to be copied."""
        words = self._words["listed"]["strings"] | dict.fromkeys(self._words["listed"]["numbers"], "#99")
        keys = rng.sample(list(words), rng.randint(1, 4))
        known = {key: self._values.pick(words[key], rng) for key in keys}
        said = rng.choice([", ", "; "]).join(f"{key} {value}" for key, value in known.items()) + "."
        return self._asked(said, rng.choice(self._words["json_asks"]), known, rng), to_json(known)

    def _asked(self, said: str, ask: str, known: Mapping[str, Any], rng: random.Random) -> str:
        """Return text and question, some with the keys that are wanted."""
        if rng.random() < 0.4:
            ask += " " + rng.choice(self._words["json_keys"]).format(keys=listed(list(known)))
        said = said[0].upper() + said[1:]
        return f"{said} {ask}" if rng.random() < 0.6 else f"{ask} {said}"

    def steps(self, rng: random.Random) -> tuple[str, str]:
        """Return a question for steps."""
        entry = rng.choice(self._words["steps"])
        question = rng.choice(self._words["steps_asks"]).format(ask=rng.choice(entry["ask"]))
        return question, to_json({"steps": entry["steps"]})

    def fact(self, rng: random.Random) -> tuple[str, str]:
        """Return something that the model knows, wanted as JSON."""
        fact = rng.choice([one for one in self._corpus.facts if '"' not in one.answer and len(one.answer) < 200])
        return f"{rng.choice(fact.asks)} {rng.choice(self._words['json_asks'])}", to_json({"answer": fact.answer})


def thoughtful(corpus: Corpus, rng: random.Random) -> list[Segment]:
    """Return a question of the corpus whose answer begins with a thought."""
    known = rng.random() < 0.7
    fact = rng.choice(corpus.facts if known else corpus.unrelated)
    question = fill_slots(rng.choice(fact.asks), rng, corpus.phrases)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": fact.answer}]
    return segments_of(messages, thought=KNOWN if known else UNKNOWN)
