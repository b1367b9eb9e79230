"""The text side of a checkpoint: a file that is not what it should be is one line, whatever is wrong in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.text.checkpoint import load_text_config
from tests.support.tables import each_row


def _checkpoint(directory: Path, **files: object) -> Path:
    for name in ("config", "generation_config", "tokenizer_config"):
        (directory / f"{name}.json").write_text(json.dumps(files.get(name, {})))
    return directory


@each_row(
    "files",
    [
        {"config": {"text_config": 5}},
        {"generation_config": {"eos_token_id": [[1]]}},
        {"tokenizer_config": {"eos_token": {"lstrip": False}}},
        {"tokenizer_config": {"chat_template": [{"name": "default"}]}},
        {"tokenizer_config": {"chat_template": ["x"]}},
        {"tokenizer_config": {"chat_template": 5}},
        {"tokenizer_config": {"chat_template": [{"name": "default", "template": 5}]}},
        {"config": {"eos_token_id": "</s>"}},
        {"generation_config": {"eos_token_id": ["</s>"]}},
        {"generation_config": {"eos_token_id": [None]}},
        {"generation_config": {"eos_token_id": True}},
        {"generation_config": {"eos_token_id": 2**62}},
        {"generation_config": {"pad_token_id": "<pad>"}},
        {"config": {"pad_token_id": 2**31}},
        {"config": {"max_position_embeddings": "4096"}},
        {"tokenizer_config": {"bos_token": {"content": 5}}},
        {"tokenizer_config": {"bos_token": "\ud800"}},
        {"generation_config": {"temperature": -1}},
        {"generation_config": {"temperature": 10**400}},
        {"generation_config": {"top_p": float("nan")}},
        {"generation_config": {"top_k": 2.5}},
        {"generation_config": {"repetition_penalty": 0}},
    ],
)
def test_what_is_not_as_it_should_be_is_named_in_one_line(tmp_path: Path, files: dict[str, object]) -> None:
    with pytest.raises(DeploymentError) as caught:
        load_text_config(_checkpoint(tmp_path, **files), {}, {})
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_no_text_is_named_in_one_line(tmp_path: Path) -> None:
    (_checkpoint(tmp_path) / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(DeploymentError, match="chat template"):
        load_text_config(tmp_path, {}, {})


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, " " * (9 << 20), "9" * 5000, "\0", ""],
    ids=["lists", "objects", "large", "a long number", "a zero byte", "empty"],
)
@pytest.mark.parametrize("name", ["config", "tokenizer_config", "generation_config"])
def test_a_file_that_cannot_be_read_is_named_in_one_line(name: str, text: str, tmp_path: Path) -> None:
    (_checkpoint(tmp_path) / f"{name}.json").write_text(text)
    with pytest.raises(DeploymentError, match=rf"/{name}\.json: ") as caught:
        load_text_config(tmp_path, {}, {})
    assert len(str(caught.value)) < 500


def test_a_device_in_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    (_checkpoint(tmp_path) / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(DeploymentError, match="config.json: is no plain file$"):
        load_text_config(tmp_path, {}, {})


def test_a_text_config_of_null_is_none(tmp_path: Path) -> None:
    assert (
        load_text_config(_checkpoint(tmp_path, config={"text_config": None, "vocab_size": 7}), {}, {}).vocab_size == 7
    )


@each_row(
    ("files", "end_ids"),
    [
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [2, 3]}}, {1, 2, 3}),
        ({"config": {"eos_token_id": [1]}, "generation_config": {"eos_token_id": 2}}, {1, 2}),
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": None}}, {1}),
        ({"config": {"eos_token_id": 4}, "generation_config": {"eos_token_id": 2}}, {2}),  # 4 is an ordinary token
        ({"config": {"eos_token_id": 4}}, {4}),
        ({"config": {"eos_token_id": -1}, "tokenizer_config": {"eos_token": "</s>"}}, {5}),
        ({"config": {"eos_token_id": [1, 9]}}, {1}),  # beyond the vocabulary
        ({"config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "</s>"}}, {1, 5}),
        ({"config": {"text_config": {"eos_token_id": 2}, "eos_token_id": 1}}, {1, 2}),
        ({"tokenizer_config": {"eos_token": "</s>"}}, {5}),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, {5}),
        ({}, set()),
    ],
)
def test_end_ids_are_those_of_all_files(tmp_path: Path, files: dict[str, object], end_ids: set[int]) -> None:
    special = {"<s>": 1, "<pad>": 2, "<unk>": 3, "</s>": 5}
    assert load_text_config(_checkpoint(tmp_path, **files), special, special).end_ids == end_ids
