"""Tokenizers that GGUF files have: the ids and texts of the tokenizers that they were made of, and of llama.cpp."""

from __future__ import annotations

import json
import logging
import os
import tracemalloc
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
    for name in more.keys() - {"model", "pre", "types", "merges"}:
        key, value = f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}", more[name]
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {bool: gguf.GGUFValueType.BOOL, str: gguf.GGUFValueType.STRING}
            large = gguf.GGUFValueType.INT32 if type(value) is int and value < 1 << 31 else gguf.GGUFValueType.UINT32
            writer.add_key_value(key, value, kinds.get(type(value), large))


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
        (lambda one: _tokens(one, ["a", "b"], merges=["a b"]), "merges is 'a b'; it must be two tokens that mak"),
        (lambda one: _tokens(one, ["a", "b"], merges=["a c"]), "merges is 'a c'; it must be two tokens that make a"),
        (lambda one: _tokens(one, ["a", "b", "ab"], merges=["a b", "ab"]), "merges is 'ab'; it must be two tokens"),
        (lambda one: _tokens(one, ["a", "b", "ab"], merges=["b  "]), "merges is 'b  '; it must be two tokens"),
        (lambda one: _tokens(one, ["a", "b", "ab"], merges=["a b", ""]), "merges is ''; it must be two tokens"),
        (lambda one: _tokens(one, ["a", "b", "ab"]), "merges is None; it must be there, by which tokens like 'ab' are"),
        (lambda one: _tokens(one, ["a"], unknown_token_id=-2), "unknown_token_id is -2; it must be the number of"),
        (lambda one: _tokens(one, ["a"], bos_token_id=(1 << 32) - 1), "bos_token_id is 4294967295; it must be the num"),
        (
            lambda one: _tokens(one, ["a"], chat_template=["a"]),
            r"tokenizer.chat_template is \['a'\]; it must be a string",
        ),
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
    settings = {"model": "llama", "scores": [0.0, 0.0], "eos_token_id": 1}
    path = write_vocabulary(tmp_path / "m.gguf", lambda writer: _tokens(writer, ["<|end|>", "a"], **settings))
    assert Tokenizer.from_checkpoint(path).config.end_ids == {1}


@pytest.mark.parametrize("none", [-1, (1 << 32) - 1])
def test_numbers_for_tokens_that_a_model_does_not_have(tmp_path: Path, none: int) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        _tokens(writer, ["a", "b"], padding_token_id=none, unknown_token_id=none, eos_token_id=1)

    tokenizer = Tokenizer.from_checkpoint(write_vocabulary(tmp_path / "m.gguf", add))
    assert tokenizer.config.special_tokens == {"eos_token": "b"}
    assert tokenizer.config.pad_id == 1  # that of the end, as where nothing is said


def test_pieces_that_are_made_in_too_many_ways(tmp_path: Path) -> None:
    """Their merges would take the cube of the file's size."""
    pieces = ["a" * length for length in range(1, 1025)]

    def add(writer: gguf.GGUFWriter) -> None:
        _tokens(writer, pieces, model="llama", scores=[0.0] * len(pieces))

    path = write_vocabulary(tmp_path / "m.gguf", add)
    tracemalloc.start()
    with pytest.raises(DeploymentError, match="tokens is '1024 pieces'; it must be such that what merges make"):
        Tokenizer.from_checkpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


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
    assert f"GGUF: tokenizer: {tmp_path / 'tokenizer.json'} counts" in caplog.text
    assert tokenizer.config.end_ids == ORIGINAL.config.end_ids
    _same(tokenizer, ORIGINAL, HARD[4])


@pytest.mark.parametrize("beside", [(), ("tokenizer_config.json",), ("generation_config.json",)])
def test_files_that_are_missing_beside_the_model_are_made_of_its_metadata(tmp_path: Path, beside: tuple[str]) -> None:
    """Ids and a template need no tokenizer of a known kind."""
    tokens = ["<end>", "<pad>", "<bos>", "a", "a"]
    special = {"eos_token_id": 0, "padding_token_id": 1, "bos_token_id": 2, "chat_template": "{{ bos_token }}x"}
    path = write_vocabulary(tmp_path / "m.gguf", lambda writer: _tokens(writer, tokens, model="bert", **special))
    for name in ("tokenizer.json", *beside):
        (tmp_path / name).write_bytes((MODEL / name).read_bytes())
    config = Tokenizer.from_checkpoint(path).config
    if "generation_config.json" in beside:
        assert config.end_ids == ORIGINAL.config.end_ids
    else:
        assert (config.end_ids, config.pad_id) == (ORIGINAL.config.end_ids, 1)
    if "tokenizer_config.json" in beside:
        assert config.chat_template == ORIGINAL.config.chat_template
    else:
        assert config.chat_template == special["chat_template"]
        assert config.special_tokens == {"bos_token": "<bos>", "eos_token": "<end>", "pad_token": "<pad>"}


def test_a_template_beside_the_model_comes_before_that_of_its_metadata(tmp_path: Path) -> None:
    settings = {"model": "bert", "bos_token_id": 0, "chat_template": "{{ bos_token }}x"}
    path = write_vocabulary(tmp_path / "m.gguf", lambda writer: _tokens(writer, ["<bos>"], **settings))
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("y")
    config = Tokenizer.from_checkpoint(path).config
    assert (config.chat_template, config.special_tokens) == ("y", {"bos_token": "<bos>"})


def test_a_model_without_any_tokens_has_what_lies_beside_it(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", lambda writer: writer.add_tokenizer_model("none"))
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    assert Tokenizer.from_checkpoint(path).config.end_ids == ORIGINAL.config.end_ids  # by their names


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_beside_the_model_are_plain_and_not_too_large(tmp_path: Path, name: str) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", lambda writer: _tokens(writer, ["a"]))
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    file = tmp_path / name
    for words in ("has 10737418240 bytes; a file of at most", "is no plain file$"):
        file.unlink(missing_ok=True)
        if words.startswith("has"):
            with file.open("wb") as sparse:
                sparse.truncate(10 << 30)
        else:
            os.mkfifo(file)
        with pytest.raises(DeploymentError, match=f"{name}: {words}"):
            Tokenizer.from_checkpoint(path)


def test_settings_beside_the_model_have_the_limit_of_settings(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", lambda writer: _tokens(writer, ["a"]))
    (tmp_path / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text(" " * (9 << 20) + "{}")
    with pytest.raises(DeploymentError, match=r"generation_config\.json: has 9437186 bytes; a file of at most 8388608"):
        Tokenizer.from_checkpoint(path)


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
