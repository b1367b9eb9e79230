"""Log-probs in step with the text: their bytes join to it, in any chunking, with half characters and stop strings."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.gateway.log_probs import LogProbStream, TextOffsets, TokenLogProb, TokenNames
from inflight.resources import DEMO
from inflight.text.detokenizer import whole_text
from inflight.text.tokenizer import Tokenizer
from tests.support.tokenizers import FAMILIES, make_tokenizer

TOKENIZER = Tokenizer.from_checkpoint(DEMO / "model")
_TOKENS = st.lists(st.integers(0, TOKENIZER.config.vocab_size - 1), max_size=12)
_TEXTS = st.text("ab é日👋🏽\n", max_size=12).map(lambda text: TOKENIZER.encode_batch([text])[0])


def text_of(tokens: list[int]) -> str:
    return whole_text(TOKENIZER, tokens)


def joined(made: list[TokenLogProb]) -> str:
    """Return the text of all bytes; those of an unfinished character at the end are in no text."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(one.bytes for one in made))


def entries(tokens: list[int], shown: int, cut: list[int]) -> list[TokenLogProb]:
    """Return what a stream of log-probs says of tokens that come in parts, of a text that ends at ``shown``."""
    stream, made, begin = LogProbStream(TOKENIZER), [], 0
    for end in [*sorted(place % (len(tokens) + 1) for place in cut), len(tokens)]:
        part = tokens[begin:end]
        stream.push(part, [-float(place) for place in range(begin, end)], [])
        begin = end
        made += stream.take(min(shown, len(text_of(tokens[:end])) // 2))
    return made + stream.finish(shown)


@given(_TEXTS, st.data(), st.lists(st.integers(0, 99), max_size=4))
def test_bytes_join_to_the_text_up_to_where_it_is_cut(tokens: list[int], data: st.DataObject, cut: list[int]) -> None:
    text = text_of(tokens)
    shown = data.draw(st.integers(0, len(text)))

    made = entries(tokens, shown, cut)

    assert b"".join(one.bytes for one in made).decode() == text[:shown]
    assert [one.token for one in made] == tokens[: len(made)]
    assert made == entries(tokens, shown, [])


@given(_TOKENS, st.lists(st.integers(0, 99), max_size=4))
def test_any_tokens_are_all_there_in_any_chunking(tokens: list[int], cut: list[int]) -> None:
    text = text_of(tokens)

    made = entries(tokens, len(text), cut)

    assert [one.token for one in made] == tokens
    assert joined(made) == text


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_bytes_join_to_the_text_whatever_the_vocabulary(family: str, data: st.DataObject) -> None:
    tokenizer = make_tokenizer(family)
    tokens = data.draw(st.lists(st.integers(3, tokenizer.config.vocab_size - 1), max_size=12))
    stream, text = LogProbStream(tokenizer), whole_text(tokenizer, tokens)

    stream.push(tokens, [0.0] * len(tokens), [])

    assert joined(stream.finish(len(text))) == text


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "unigram"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_tokens_of_an_unfinished_character_keep_their_bytes(family: str, size: int) -> None:
    tokenizer = make_tokenizer(family)
    pieces = {tokenizer.token_bytes[token]: token for token in range(tokenizer.config.vocab_size)}
    raw = [bytes([byte]) for byte in "😀".encode()[:size]]
    stream = LogProbStream(tokenizer)

    stream.push([pieces[byte] for byte in raw], [-1.0] * size, [])

    assert [(one.bytes, one.log_prob) for one in stream.finish(0)] == [(byte, -1.0) for byte in raw]


PIECES = [b"a", b"", "日".encode()[:2], "👋".encode()[1:], "é\N{REPLACEMENT CHARACTER}".encode(), bytes([255])]


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.integers(0, 9))
def test_a_token_has_the_place_of_the_character_in_which_it_begins(pieces: list[bytes], start: int) -> None:
    offsets, raw = TextOffsets(start), b"".join(pieces)
    places = [start + place for place, part in enumerate(characters(raw)) for _ in part]

    for index, piece in enumerate(pieces):
        place = offsets.push(piece)
        if piece:
            assert place == places[len(b"".join(pieces[:index]))]


def characters(raw: bytes) -> list[bytes]:
    """Return the bytes of each character, and of each part that is no UTF-8 and becomes a replacement character."""
    try:
        return [one.encode() for one in raw.decode()]
    except UnicodeDecodeError as error:
        whole = [one.encode() for one in raw[: error.start].decode()]
        return [*whole, raw[error.start : error.end], *characters(raw[error.end :])]


def test_names_of_tokens() -> None:
    names = TokenNames(TOKENIZER, "bytes:")
    assert names.name(2) == "<|im_end|>"
    assert names.name(5, b"\xf0\x9f") == r"bytes:\xf0\x9f"
    assert TokenNames(TOKENIZER, as_ids=True).name(7) == "token_id:7"
