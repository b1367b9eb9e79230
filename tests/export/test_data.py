"""Calibration data: what files may hold, how they are mixed, how rows become tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.export.data import DataSet, RowEncoder, Source
from inflight.export.verify.measures import recall_examples
from inflight.resources import CALIBRATION_DATA, HELD_OUT_DATA
from inflight.text.tokenizer import Tokenizer
from tests.export.support.tiny import DEMO


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(DEMO)


def lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_a_mix_is_sampled_by_weight_and_repeatably(tmp_path: Path) -> None:
    chats = lines(tmp_path / "chats.jsonl", [{"text": f"chat {number}"} for number in range(100)])
    (tmp_path / "docs.txt").write_text("\n\n".join(f"paragraph {number}" for number in range(100)))
    sources = [Source.parse(f"{chats}:3"), Source.parse(f"{tmp_path / 'docs.txt'}:1")]
    one, two = DataSet(sources, 40), DataSet(sources, 40)
    assert one.mix == {"chats.jsonl": 30, "docs.txt": 10}
    assert one.describe() == "30 rows of chats.jsonl, 10 rows of docs.txt"
    assert one.sha256 == two.sha256
    assert one._rows == two._rows
    assert DataSet(sources, 40, seed=2).sha256 != one.sha256
    chats.write_text(chats.read_text() + '{"text": "one more"}\n')
    assert DataSet(sources, 40).sha256 != one.sha256


def test_a_file_that_has_too_few_rows_gives_all(tmp_path: Path) -> None:
    few = lines(tmp_path / "few.jsonl", [{"text": "one"}, {"text": "two"}])
    assert DataSet([Source(few)], 100).mix == {"few.jsonl": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "fine"}\n{"texts": "misspelt"}\n', "line 2: a JSON object with"),
        ('{"text": "fine"}\n{broken\n', "line 2: "),
        ('{"messages": [{"role": "user", "content": "no answer"}]}\n', "end with the assistant's"),
        ('{"messages": [{"role": "user"}]}\n', "content"),
        ("\n\n", "has no rows"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(DeploymentError, match=message):
        DataSet([Source(path)], 10)


def test_a_bad_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DeploymentError, match="not UTF-8: .* at byte 3"):
        DataSet([Source(tmp_path / "latin.txt")], 10)
    with pytest.raises(DeploymentError, match="nowhere is not a file"):
        Source.parse("nowhere")
    for weight in ("0", "-1", "nan", "many"):
        with pytest.raises(DeploymentError, match="not a number above zero"):
            Source.parse(f"{tmp_path / 'data.jsonl'}:{weight}")


def test_a_chat_is_rendered_by_the_checkpoints_template(tokenizer: Tokenizer) -> None:
    row = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}
    example = RowEncoder(tokenizer, 100).encode(row)
    text = tokenizer._backend.decode(list(example.prompt), skip_special_tokens=False)
    assert text == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(example.completion) == "Because."
    assert example.chat


def test_a_long_prompt_loses_its_beginning_and_keeps_its_answer(tokenizer: Tokenizer) -> None:
    row = {"prompt": "word " * 100 + "the end:", "completion": " the answer"}
    example = RowEncoder(tokenizer, 20).encode(row)
    assert len(example.tokens) == 20
    assert tokenizer.decode(example.tokens).endswith("the end: the answer")


def test_recall_asks_the_first_question_again(tokenizer: Tokenizer) -> None:
    data = DataSet([Source(HELD_OUT_DATA)], 400)
    made = recall_examples(data, tokenizer, 1024, 6)
    assert len(made) == 6
    assert all(len(example.tokens) <= 1024 for example in made)
    assert len(made[2].tokens) > 0.8 * 1024 * 0.9 > len(made[0].tokens)
    for example in made:
        answer = tokenizer.decode(example.completion)
        assert answer in tokenizer.decode(example.prompt)


def test_there_is_nothing_to_recall_without_answers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = lines(tmp_path / "texts.jsonl", [{"text": "one"}, {"text": "two"}])
    assert recall_examples(DataSet([Source(texts)], 2), tokenizer, 512, 6) == []


def test_the_default_data_sets_share_no_question() -> None:
    def asked(path: Path) -> set[str]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {message["content"] for row in rows for message in row.get("messages", []) if message["role"] == "user"}

    calibration, held_out = asked(CALIBRATION_DATA), asked(HELD_OUT_DATA)
    assert len(held_out) > 200
    assert not calibration & held_out


def test_data_that_measures_nothing_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    empty = lines(tmp_path / "empty.jsonl", [{"text": ""}, {"prompt": "?", "completion": ""}])
    with pytest.raises(DeploymentError, match="2 rows of empty.jsonl: none has two tokens or more"):
        DataSet([Source(empty)], 2).examples(tokenizer, 100)
    many = lines(tmp_path / "many.jsonl", [{"text": f"row {number}"} for number in range(100)])
    with pytest.raises(DeploymentError, match="its weight gives it none of 10 rows"):
        DataSet([Source(many, 100.0), Source(empty, 1.0)], 10)


def test_files_of_one_name_are_counted_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines(tmp_path / name / "data.jsonl", [{"text": f"{name} {number}"} for number in range(6)])
    data = DataSet([Source(tmp_path / name / "data.jsonl") for name in ("a", "b")], 12)
    assert sorted(data.mix.values()) == [6, 6]
    # The same bytes read as text are other rows.
    as_text = tmp_path / "data.txt"
    as_text.write_bytes((tmp_path / "a/data.jsonl").read_bytes())
    assert DataSet([Source(as_text)], 6).sha256 != DataSet([Source(tmp_path / "a/data.jsonl")], 6).sha256
