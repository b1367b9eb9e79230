"""Log-probs in step with the text: their bytes join to it, in any chunking, with half characters and stop strings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight.gateway.log_probs import LogProbStream, TokenLogProb, TokenNames
from inflight.resources import DEMO
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_checkpoint(DEMO / "model")
_TOKENS = st.lists(st.integers(0, TOKENIZER.config.vocab_size - 1), max_size=12)
_TEXTS = st.text("ab é日👋🏽\n", max_size=12).map(lambda text: TOKENIZER.encode_batch([text])[0])


def text_of(tokens: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    return detokenizer.push(tokens) + detokenizer.finish()


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
    assert b"".join(one.bytes for one in made).decode("utf-8", "replace") == text


def test_names_of_tokens() -> None:
    names = TokenNames(TOKENIZER, "bytes:")
    assert names.name(2) == "<|im_end|>"
    assert names.name(5, b"\xf0\x9f") == r"bytes:\xf0\x9f"
    assert TokenNames(TOKENIZER, as_ids=True).name(7) == "token_id:7"
