"""Tokenizers that GGUF files have: the ids and texts of the tokenizers that they were made of, and of llama.cpp."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from transformers.convert_slow_tokenizer import generate_merges

from inflight.errors import DeploymentError
from inflight.gguf.words import WORDS
from inflight.resources import DEMO, bundled
from inflight.text.tokenizer import Tokenizer
from tests.support.gguf_tokenizers import add_byte_level, add_demo, add_sentencepiece, read_tokenizer, write_vocabulary
from tests.support.tokenizers import TEXTS, make_tokenizer

MODEL = bundled(DEMO) / "model"
FACTS = read_tokenizer(Path(__file__).parents[1] / "facts/gguf_tokens.json")
HARD = [
    "", " ", "  two  spaces ", "\n\n\t x", "don't DON'T I'LL", "1234567 12 3.14", "e\u0301 ñ ﬁ Ⅷ ½", "a\u00a0b\u3000c",
    "👩\u200d👩\u200d👧🏳️\u200d🌈", "<|im_start|>user\nhi<|im_end|>", "«tool»x «tool»", "<s>a</s> <0x41>", "\0\1",
    "日本語。中文，한국어",
]  # fmt: skip
_any_text = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n'1aé日▁<>|")), max_size=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def demo(folder: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(write_vocabulary(folder / "demo.gguf", add_demo))


def _same(ours: Tokenizer, theirs: Tokenizer, text: str) -> None:
    ids = theirs.encode_batch([text])[0]
    assert ours.encode_batch([text])[0] == ids
    assert ours.decode(ids) == theirs.decode(ids)
    assert [ours.token_bytes[id] for id in ids] == [theirs.token_bytes[id] for id in ids]


@pytest.mark.parametrize("text", [*TEXTS, *HARD])
def test_the_demos_tokenizer(demo: Tokenizer, text: str) -> None:
    _same(demo, Tokenizer.from_checkpoint(MODEL), text)


ORIGINAL = Tokenizer.from_checkpoint(MODEL)


@given(text=_any_text)
def test_the_demos_tokenizer_on_any_text(demo: Tokenizer, text: str) -> None:
    _same(demo, ORIGINAL, text)


def test_what_goes_with_the_demos_tokenizer(demo: Tokenizer) -> None:
    assert demo.config.end_ids == ORIGINAL.config.end_ids == frozenset({0, 2})
    assert (demo.config.pad_id, demo.config.chat_template) == (3, ORIGINAL.config.chat_template)
    assert demo.config.special_tokens == ORIGINAL.config.special_tokens
    assert (demo.config.vocab_size, demo.config.max_length) == (7, 64)  # the model's
    assert demo._backend.get_vocab() == ORIGINAL._backend.get_vocab()  # what only fills gaps is no token


def _sentencepiece(family: str, folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """Return a tokenizer with byte fallback as it comes from a file, and as transformers converts SentencePiece's."""
    data = read_original(family)
    scores: dict[str, float] = {}
    path = write_vocabulary(folder / f"{family}.gguf", lambda writer: scores.update(add_sentencepiece(writer, data)))
    special = {token["content"] for token in data["added_tokens"]}
    pieces = {token: score for token, score in scores.items() if token not in special and not token.startswith("<0x")}
    data["model"]["merges"] = generate_merges(data["model"]["vocab"], pieces)
    return Tokenizer.from_checkpoint(path), Tokenizer(Backend.from_str(json.dumps(data)), make_tokenizer(family).config)


def read_original(family: str) -> dict[str, Any]:
    """Return a family's ``tokenizer.json``."""
    data: dict[str, Any] = json.loads(make_tokenizer(family)._backend.to_str())
    return data


@pytest.fixture(scope="module", params=["byte fallback, Llama 2", "byte fallback, Gemma"])
def sentencepiece(request: pytest.FixtureRequest, folder: Path) -> tuple[Tokenizer, Tokenizer]:
    return _sentencepiece(request.param, folder)


@pytest.mark.parametrize("text", [*TEXTS, *HARD])
def test_sentencepiece(sentencepiece: tuple[Tokenizer, Tokenizer], text: str) -> None:
    _same(*sentencepiece, text)


@given(text=_any_text)
def test_sentencepiece_on_any_text(sentencepiece: tuple[Tokenizer, Tokenizer], text: str) -> None:
    _same(*sentencepiece, text)


def test_what_goes_with_sentencepiece(sentencepiece: tuple[Tokenizer, Tokenizer]) -> None:
    ours = sentencepiece[0]
    assert ours.config.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.config.end_ids == {2}
    assert ours.encode_batch(["a"], add_special_tokens=True)[0] == [1, *ours.encode_batch(["a"])[0]]


@pytest.mark.parametrize("name", FACTS["ids"])
def test_words_are_split_as_llama_cpp_splits_them(folder: Path, name: str) -> None:
    """But for where llama.cpp knows too little: see the facts' ``but``."""
    data = read_tokenizer(MODEL / "tokenizer.json")
    path = write_vocabulary(folder / f"{name}.gguf", lambda writer: add_byte_level(writer, data, name))
    assert Tokenizer.from_checkpoint(path).encode_batch(FACTS["texts"]) == FACTS["ids"][name]


def test_every_rule_is_in_the_facts() -> None:
    known = [WORDS[name] for name in FACTS["ids"]]
    assert all(words in known for words in WORDS.values())


def _tokens(writer: gguf.GGUFWriter, tokens: list[str], **more: Any) -> None:
    settings = {"model": "gpt2", "pre": "gpt-2", "types": [1] * len(tokens), "merges": [], **more}
    writer.add_tokenizer_model(settings["model"])
    writer.add_tokenizer_pre(settings["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(settings["types"])
    writer.add_token_merges(settings["merges"])
    for name in ("eos_token_id", "scores", "remove_extra_whitespaces", "add_bos_token", "bos_token_id"):
        if name in more:
            key, value = f"tokenizer.ggml.{name}", more[name]
            if isinstance(value, list):
                writer.add_array(key, value)
            else:
                kind = gguf.GGUFValueType.BOOL if isinstance(value, bool) else gguf.GGUFValueType.INT32
                writer.add_key_value(key, value, kind)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda one: _tokens(one, ["a"], model="bert"), "tokenizer.ggml.model is 'bert'; it must be gpt2 or llama; of"),
        (
            lambda one: _tokens(one, ["a"], pre="qwen"),
            "pre is 'qwen'; it must be one of gpt-2, .*mean 'qwen2'",
        ),
        (lambda one: _tokens(one, ["a", "b", "a"]), "tokenizer.ggml.tokens is 'a'; it must be there once"),
        (lambda one: _tokens(one, ["a", "b"], types=[1]), "token_type is .*; it must be a list of 2 numbers"),
        (
            lambda one: _tokens(one, ["a"], eos_token_id=5),
            "eos_token_id is 5; it must be the number of one of 1 t",
        ),
        (lambda one: _tokens(one, ["a"], eos_token_id=-1), "eos_token_id is -1"),
        (lambda one: _tokens(one, ["a"], model="llama"), "scores is None; it must be 1 finite numbers"),
        (lambda one: _tokens(one, ["a"], model="llama", scores=[float("nan")]), "scores is 'not finite'"),
        (lambda one: _tokens(one, ["a" * 2000], model="llama", scores=[0.0]), "of at most 1024 characters"),
        (
            lambda one: _tokens(one, ["a"], model="llama", scores=[0.0], remove_extra_whitespaces=True),
            "remove_extra_whitespaces is True",
        ),
        (lambda one: _tokens(one, ["a", "b"], merges=["a c"]), "not a tokenizer: .*"),
        (lambda one: _tokens(one, ["a", "b"], add_bos_token=7), "add_bos_token is 7; it must be a bool"),
    ],
)
def test_what_is_refused(tmp_path: Path, add: Callable[[gguf.GGUFWriter], None], message: str) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", add)
    with pytest.raises(DeploymentError, match=message) as error:
        Tokenizer.from_checkpoint(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "a"], {0, 1, 2}),
        (["a", "<|im_end|>", "<|endoftext|>", "<|im_start|>"], {1, 2}),
        (["<|return|>", "<|call|>", "<|end|>", "<|start|>"], {0, 1}),
        (["<|end|>", "<|user|>"], {0}),
        (["<eos>", "<end_of_turn>"], {1}),
    ],
)
def test_tokens_that_end_an_answer(tmp_path: Path, tokens: list[str], ends: set[int]) -> None:
    kinds = [3 if token.startswith("<") else 1 for token in tokens]
    path = write_vocabulary(tmp_path / "m.gguf", lambda writer: _tokens(writer, tokens, types=kinds))
    assert Tokenizer.from_checkpoint(path).config.end_ids == ends


def test_an_ordinary_token_of_that_text_ends_nothing(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", lambda writer: _tokens(writer, ["<|end|>", "a"], eos_token_id=1))
    assert Tokenizer.from_checkpoint(path).config.end_ids == {1}


def test_phi3_takes_the_space_behind_a_control_token(tmp_path: Path) -> None:
    """As its ``tokenizer.json`` says; a GGUF file does not."""
    tokens, kinds = ["<unk>", "<s>", "<|user|>", "▁", "a"], [2, 3, 3, 1, 1]

    def add(writer: gguf.GGUFWriter) -> None:
        _tokens(writer, tokens, model="llama", types=kinds, scores=[0.0] * 5, bos_token_id=1)

    path = write_vocabulary(tmp_path / "m.gguf", add, "phi3")
    stripped, kept = Tokenizer.from_checkpoint(path).encode_batch(["<|user|> \na", "<s> a"])
    assert (stripped, kept) == ([2, 3, 4], [1, 3, 3, 4])


def test_a_tokenizer_beside_the_file_is_taken(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", lambda writer: _tokens(writer, ["a"], model="bert"))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    with caplog.at_level(logging.INFO, "inflight.gguf"):
        tokenizer = Tokenizer.from_checkpoint(path)
    assert f"{tmp_path / 'tokenizer.json'} is taken in place of what the model's file says" in caplog.text
    assert tokenizer.config.end_ids == ORIGINAL.config.end_ids
    _same(tokenizer, ORIGINAL, HARD[4])


@given(data=st.data())
def test_whatever_a_files_metadata_say(folder: Path, data: st.DataObject) -> None:
    """They give a tokenizer, or one error."""
    original = folder / "whole.gguf"
    if not original.exists():
        write_vocabulary(original, lambda writer: add_sentencepiece(writer, read_original("byte fallback, Llama 2")))
    content = bytearray(original.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = int(data.draw(st.floats(0, 1, exclude_max=True)) * len(content))
        numbers = [bytes(4), b"\xff" * 4, b"\0\0\xc0\x7f", b"\0\0\0\xbf", b"\1\0\0\0"]
        content[at : at + 4] = data.draw(st.sampled_from(numbers))
    path = folder / "changed.gguf"
    path.write_bytes(content)
    with suppress(DeploymentError):
        Tokenizer.from_checkpoint(path).encode_batch(["a text"], add_special_tokens=True)
