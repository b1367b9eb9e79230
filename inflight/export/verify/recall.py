"""Long prompts whose answer stands far back: does a checkpoint still see it, through a quantized cache too?"""

from __future__ import annotations

import random

from inflight.export.data import DataSet, Example, Row, RowEncoder
from inflight.text.tokenizer import Tokenizer

SHARES = (0.25, 0.5, 0.9)
"""How much of the longest sequence the prompts fill."""


def recall_examples(data: DataSet, tokenizer: Tokenizer, max_length: int, count: int, seed: int = 1) -> list[Example]:
    """Make prompts of many questions with their answers, that ask the first one again.

    The answer is in the prompt, at its beginning: a model repeats it if attention still reaches that far.

    Args:
        data: its rows that are questions with answers are used.
        tokenizer: of the checkpoint.
        max_length: of prompt and answer, in tokens.
        count: how many to make, in equal parts for each of ``SHARES``.
        seed: of the choice.
    """
    encoder, rows, rng = RowEncoder(tokenizer, max_length), data.answered(), random.Random(seed)
    lengths = [len(encoder.encode(row).tokens) for row in rows]
    made = []
    for index in range(count if len(rows) > 1 else 0):
        asked, *others = rng.sample(range(len(rows)), len(rows))
        rest, taken = max_length * SHARES[index % len(SHARES)] - 2 * lengths[asked], [rows[asked]]
        for other in others:
            if lengths[other] > rest:
                break
            rest -= lengths[other]
            taken.append(rows[other])
        if len(taken) > 1:
            made.append(encoder.encode(_joined([*taken, rows[asked]])))
    return made


def _joined(rows: list[Row]) -> Row:
    """Return several questions and answers as one row; those of a mixed file are joined as prompts."""
    if all("messages" in row for row in rows):
        return {"messages": [message for row in rows for message in row["messages"]]}
    pairs = [_as_text(row) for row in rows]
    before = "".join(f"{question}{answer}\n" for question, answer in pairs[:-1])
    return {"prompt": before + pairs[-1][0], "completion": pairs[-1][1]}


def _as_text(row: Row) -> tuple[str, str]:
    if "prompt" in row:
        return row["prompt"], row["completion"]
    *before, answer = (message["content"] for message in row["messages"])
    return "".join(f"{text}\n" for text in before), answer
