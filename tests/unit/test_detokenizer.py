"""Streamed text is the whole decoding, and stop strings never leak: over tokenizer families, scripts and emoji."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from inflight.errors import DeploymentError
from inflight.text.checkpoint import TextConfig
from inflight.text.detokenizer import IncrementalDetokenizer, StreamText, whole_text
from inflight.text.stops import StopMatcher, StopTextLimit
from inflight.text.tokenizer import DecoderKind, Tokenizer
from tests.support.tokenizers import FAMILIES, TEXTS, make_tokenizer, shown_text

_scripts = st.sampled_from(
    [*TEXTS[:5], "😀", "👩‍👩‍👧‍👦", "🇩🇪", "é", "e\u0301", "ก็", "  ", "\n", " ", "▁", "<0x41>", "«tool»", "\ufffd"]
)
_text = st.lists(_scripts | st.text(max_size=8), max_size=6).map("".join)
_each_family = pytest.mark.parametrize("family", FAMILIES)


def _parts(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted({cut % (len(tokens) + 1) for cut in cuts}), len(tokens)]
    return [tokens[start:end] for start, end in itertools.pairwise(bounds)]


@_each_family
@given(text=_text, cuts=st.lists(st.integers(0, 500), max_size=8))
def test_stream_of_a_text_is_its_whole_decoding(family: str, text: str, cuts: list[int]) -> None:
    tokenizer = make_tokenizer(family)
    [tokens] = tokenizer.encode_batch([text])
    stream = IncrementalDetokenizer(tokenizer)
    joined = "".join(stream.push(part) for part in _parts(tokens, cuts)) + stream.finish()
    assert joined == tokenizer.decode(tokens)


@_each_family
@given(data=st.data())
def test_stream_of_any_tokens_is_their_whole_decoding(family: str, data: st.DataObject) -> None:
    """Models also make what no text encodes to: broken characters, special tokens, marks in odd places.

    An unfinished character at the end is left out, while the library replaces it: the answer was cut there, and half a
    character is of no use to a reader.
    """
    tokenizer = make_tokenizer(family)
    tokens = data.draw(st.lists(st.integers(0, tokenizer.config.vocab_size - 1), max_size=40))
    stream = IncrementalDetokenizer(tokenizer)
    shown = [stream.push([token]) for token in tokens]
    assert "".join(shown) + stream.finish() == shown_text(tokenizer, tokens)


@_each_family
@pytest.mark.parametrize("character", ["é", "ก", "日", "😀"])
def test_half_a_character_at_the_end_is_left_out(family: str, character: str) -> None:
    tokenizer = make_tokenizer(family)
    pieces = {tokenizer.token_bytes[token]: token for token in range(tokenizer.config.vocab_size)}
    raw = character.encode()
    if not all(bytes([byte]) in pieces for byte in raw):
        pytest.skip("it has no tokens of bytes")
    tokens = tokenizer.encode_batch(["ok"])[0] + [pieces[bytes([byte])] for byte in raw]

    for left_out in range(1, len(raw)):
        assert whole_text(tokenizer, tokens[:-left_out]) == "ok"
        delta = StreamText(tokenizer).push(tokens[:-left_out], None, final=True)
        assert delta == ("ok", 0, 2)
        limit = StopTextLimit(tokenizer, ["never"])
        for token in tokens[:-left_out]:
            limit.push(token)
        assert limit.finish() == 2
    assert whole_text(tokenizer, tokens) == f"ok{character}"
    broken = whole_text(tokenizer, [*tokens[:-1], *tokenizer.encode_batch(["ok"])[0]])
    assert "\N{REPLACEMENT CHARACTER}" in broken, "text has followed, so the character stays broken"


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_the_first_space_is_kept_by_the_prepend_scheme_never_alone(scheme: str) -> None:
    backend = Backend(models.WordLevel({"▁how": 0, "▁much": 1}, unk_token="▁how"))
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = Tokenizer(backend, TextConfig(2, frozenset(), None, {}, None))
    stream = IncrementalDetokenizer(tokenizer)
    text = stream.push([0]) + stream.push([1]) + stream.finish()
    assert text == tokenizer.decode([0, 1]) == (" how much" if scheme == "never" else "how much")


@_each_family
def test_text_is_shown_as_soon_as_it_is_settled(family: str) -> None:
    tokenizer = make_tokenizer(family)
    [tokens] = tokenizer.encode_batch(["how much wood"])
    stream = IncrementalDetokenizer(tokenizer)
    for count, token in enumerate(tokens, 1):
        shown = tokenizer.decode(tokens[:count])
        assert stream.push([token]) == shown[len(tokenizer.decode(tokens[: count - 1])) :]
    assert stream.finish() == ""


@_each_family
@given(text=_text, stop_at=st.integers(0, 200), stop_size=st.integers(1, 12), others=st.lists(st.text(min_size=1)))
def test_text_ends_before_the_stop_string(
    family: str, text: str, stop_at: int, stop_size: int, others: list[str]
) -> None:
    tokenizer = make_tokenizer(family)
    [tokens] = tokenizer.encode_batch([text])
    whole = tokenizer.decode(tokens)
    stops = [whole[stop_at : stop_at + stop_size] or "never", *others]
    limits, stream, shown = StopTextLimit(tokenizer, stops), StreamText(tokenizer), ""
    for token in tokens:
        matched = limits.push(token)
        shown += stream.push([token], limits.limit, final=False).text
        assert not any(stop in shown for stop in stops)
        if matched:
            break
    shown += stream.push([], limits.finish(), final=True).text
    assert whole.startswith(shown)
    assert not any(stop in shown for stop in stops)
    # Whatever was cut is cut because a stop string begins there.
    assert shown == whole or any(whole[len(shown) :].startswith(stop) for stop in stops)


def test_a_stop_string_is_found_across_parts() -> None:
    matcher = StopMatcher(["STOP", "\n\n"])
    shown = []
    for part in ("one S", "T", "O", "two ST", "OP three"):
        if matcher.push(part):
            break
        shown.append(matcher.settled)
    assert shown == [4, 4, 4, 11]
    assert matcher.match_start == len("one STOtwo ")


def test_the_stop_that_ends_first_wins_and_the_longest_of_those() -> None:
    matcher = StopMatcher(["b", "ab", "abc"])
    assert matcher.push("xxabc")
    assert matcher.match_start == 2


def test_min_tokens_shows_stop_strings_that_come_before() -> None:
    tokenizer = make_tokenizer("byte level")
    [tokens] = tokenizer.encode_batch(["no no no"])
    limits = StopTextLimit(tokenizer, ["no"])
    matched = [limits.push(token, may_stop=index >= len(tokens) - 2) for index, token in enumerate(tokens)]
    assert matched[-1]
    assert tokenizer.decode(tokens)[: limits.limit].count("no") >= 1


def test_deltas_carry_their_exact_place() -> None:
    tokenizer = make_tokenizer("byte level")
    [tokens] = tokenizer.encode_batch(["née 😀 ok"])
    stream, text = StreamText(tokenizer), ""
    for index, token in enumerate(tokens):
        delta = stream.push([token], None, final=index == len(tokens) - 1)
        assert (delta.start, delta.end) == (len(text), len(text) + len(delta.text))
        text += delta.text
    assert text == "née 😀 ok"


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (None, "it has no decoder"),
        (decoders.WordPiece(), "decoder WordPiece is not supported"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), "ByteLevel, Strip are not supported"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteLevel()]), "ByteLevel, Replace are not supported"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.ByteFallback()]), "ByteFallback, ByteLevel are not"),
    ],
    ids=str,
)
def test_a_decoder_that_cannot_be_followed_stops_the_start(decoder: decoders.Decoder | None, reason: str) -> None:
    backend = Backend(models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend, TextConfig(1, frozenset(), None, {}, None))
    with pytest.raises(DeploymentError, match=reason):
        _ = tokenizer.token_bytes


def test_fusing_changes_nothing_at_byte_level() -> None:
    backend = Backend(models.BPE())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer = Tokenizer(backend, TextConfig(1, frozenset(), None, {}, None))
    assert tokenizer.token_bytes.decoder is DecoderKind.BYTE_LEVEL
