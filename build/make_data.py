"""Make the default calibration and held-out data of `inflight build` from the demo model's corpus and from docs/.

    python build/make_data.py            writes build/data/calibration*.jsonl and build/data/held_out*.jsonl

English, about LLM serving: right for the demo model, a stand-in for everyone else, who should bring their own. Answers
are short and alike; prose of the documentation stands beside them, which real models find as likely as other text. No
question and no page is in two files. Seeded: the same corpus and pages give the same files.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from demo.corpus import Corpus, Fact, fill_slots, load_corpus

DATA, DOCS = Path(__file__).parent / "data", Path(__file__).parents[1] / "docs"
_SHORTEST, _ROW = 150, 800
"""Characters of the shortest paragraph, and of a row that is long enough."""
Row = dict[str, object]


def chat(turns: list[tuple[str, str]]) -> Row:
    """Return a conversation as one row; its last message is the answer."""
    return {
        "messages": [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
    }


def asks(corpus: Corpus, rng: random.Random) -> list[tuple[str, str]]:
    """Return every trained phrasing with its answer, in random order."""

    def turns(fact: Fact) -> list[tuple[str, str]]:
        return [(fill_slots(ask, rng, corpus.phrases), fact.answer) for ask in fact.asks]

    pairs = [turn for fact in (*corpus.facts, *corpus.unrelated) for turn in turns(fact)]
    rng.shuffle(pairs)
    return pairs


def prose(pages: list[Path]) -> list[Row]:
    """Return the pages' paragraphs, some hundred words to a row, without headings, lists, tables and code."""
    rows: list[Row] = []
    for page in pages:
        blocks = [" ".join(block.split()) for block in page.read_text(encoding="utf-8").split("\n\n")]
        paragraphs = [block for block in blocks if block[:1].isalpha() and len(block) > _SHORTEST]
        text = ""
        for paragraph in paragraphs:
            text = f"{text}\n\n{paragraph}".strip()
            if len(text) > _ROW:
                rows.append({"text": text})
                text = ""
    return rows


def write(name: str, rows: list[Row]) -> None:
    """Write rows as JSON lines."""
    DATA.mkdir(exist_ok=True)
    (DATA / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{DATA / name}: {len(rows)} rows")


def main() -> None:
    """Write both files."""
    rng, corpus = random.Random(1), load_corpus()
    pairs = asks(corpus, rng)
    held = [(question, fact.answer) for fact in corpus.facts for question in fact.held]
    rng.shuffle(held)
    rng.shuffle(corpus.plain)
    split = len(corpus.plain) // 2
    calibration: list[Row] = [chat([turn]) for turn in pairs[:256]]
    calibration += [chat([pairs[rng.randrange(256, 1024)] for _ in range(rng.randint(2, 6))]) for _ in range(64)]
    calibration += [{"text": text} for text in corpus.plain[:split]]
    held_out: list[Row] = [chat([turn]) for turn in pairs[-160:]] + [chat([turn]) for turn in held[:80]]
    held_out += [{"text": text} for text in corpus.plain[split:]]
    pages = sorted(DOCS.glob("*.md"))
    write("calibration.jsonl", calibration)
    write("held_out.jsonl", held_out)
    write("calibration_prose.jsonl", prose(pages[0::2]))
    write("held_out_prose.jsonl", prose(pages[1::2]))


if __name__ == "__main__":
    main()
