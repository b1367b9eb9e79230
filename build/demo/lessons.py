"""All that the demo model learns: its corpus about LLM serving, conversations with tools, and JSON.

It does not know token ids or the model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from demo.conversation import Segment
from demo.corpus import Corpus, examples, load_corpus
from demo.structured import JsonTalk, thoughtful
from demo.tools import ToolTalk, read_words
from demo.values import Values

CONVERSATIONS, OBJECTS, THOUGHTS = 800, 500, 150
"""Examples of each kind in one epoch, beside those of the corpus."""


@dataclass(frozen=True)
class Lessons:
    """The corpus, and the writers of the examples beside it."""

    corpus: Corpus
    tools: ToolTalk
    json: JsonTalk
    values: Values

    def epoch(self, rng: random.Random) -> list[list[Segment]]:
        """Return the examples of one epoch in random order, in new words each time."""
        all_of_it = list(examples(self.corpus, rng))
        all_of_it += [self.tools.conversation(rng) for _ in range(CONVERSATIONS)]
        all_of_it += [self.json.example(rng) for _ in range(OBJECTS)]
        all_of_it += [thoughtful(self.corpus, rng) for _ in range(THOUGHTS)]
        rng.shuffle(all_of_it)
        return all_of_it

    def prose(self, seed: int) -> Iterator[str]:
        """Yield the corpus's examples as text: most of the vocabulary is made of it."""
        rng = random.Random(seed)
        for _ in range(2):
            for segments in examples(self.corpus, rng):
                yield "".join(text for text, _ in segments)

    def structured(self, seed: int) -> Iterator[str]:
        """Yield conversations with tools, and JSON, as text: the rest of the vocabulary is made of it."""
        rng = random.Random(seed)
        for _ in range(3000):
            for segments in (self.tools.conversation(rng), self.json.example(rng)):
                yield "".join(text for text, _ in segments)


def load_lessons() -> Lessons:
    """Read the files of `corpus/`."""
    corpus, words = load_corpus(), read_words()
    values = Values(words["values"])
    return Lessons(corpus, ToolTalk(corpus, words, values), JsonTalk(corpus, words, values), values)
