"""Streamed text of published tokenizers is the whole decoding, wherever the stream is cut.

It ends before a character that is cut at the end, for which the library shows a replacement.
"""

from __future__ import annotations

import random

import pytest

from benchmarks.environments import Home
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer
from tests.published.support.strings import texts
from tests.published.support.tokenizers import ALL, load_tokenizer
from tests.support.tokenizers import shown_text

pytestmark = [pytest.mark.published, pytest.mark.timeout(900)]

SEQUENCES, LENGTH = 400, 24


def _streamed(tokenizer: Tokenizer, tokens: list[int], draw: random.Random) -> str:
    stream, shown, place = IncrementalDetokenizer(tokenizer), "", 0
    while place < len(tokens):
        count = draw.choice((1, 1, 1, 2, 5))
        shown += stream.push(tokens[place : place + count])
        place += count
    return shown + stream.finish()


@pytest.mark.parametrize("name", ALL)
def test_streams_are_whole_decodings(home: Home, name: str) -> None:
    tokenizer, draw = load_tokenizer(home, name), random.Random(3)
    sequences = tokenizer.encode_batch(texts(), add_special_tokens=True)
    for _ in range(SEQUENCES):  # half of them of few tokens, so that bytes of characters meet
        most = draw.choice((700, tokenizer.config.vocab_size))
        sequences.append([draw.randrange(most) for _ in range(LENGTH)])
    rows = [(tokens, _streamed(tokenizer, tokens, draw), shown_text(tokenizer, tokens)) for tokens in sequences]
    assert not [row for row in rows if row[1] != row[2]]
