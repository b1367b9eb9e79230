"""What a checkpoint's files say of its embeddings: pooling, lengths, and what is not served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.text.embedding import EmbeddingFormat, read_embedding_format

_TYPE = "sentence_transformers.models."


def _write(folder: Path, pooling: Any = None, kinds: str = "Transformer Pooling Normalize", **config: Any) -> Path:
    """Write a checkpoint's files; ``pooling`` is of ``1_Pooling/config.json``, without which there are no modules."""
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64} | config))
    if pooling is not None:
        paths = {"Transformer": "", "Pooling": "1_Pooling"}
        modules = [{"type": _TYPE + kind, "path": paths.get(kind, f"2_{kind}")} for kind in kinds.split()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_pooling_is_read_in_both_forms(tmp_path: Path, pooling: dict[str, Any], expected: str) -> None:
    assert read_embedding_format(_write(tmp_path, pooling)) == EmbeddingFormat(expected, "", 64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pooling", "kinds", "words"),
    [
        ({"pooling_mode_cls_token": True}, "Transformer Pooling", "its pooling is pooling_mode_cls_token"),
        ({"pooling_mode": "max"}, "Transformer Pooling", "its pooling is max"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            "Transformer Pooling",
            "pooling_mode_mean_tokens with pooling_mode_max_tokens",
        ),
        ({"pooling_mode": "mean"}, "Transformer Pooling Dense Normalize", "a module 'Dense'"),
    ],
)
def test_what_is_not_served_is_named(tmp_path: Path, pooling: dict[str, Any], kinds: str, words: str) -> None:
    folder = _write(tmp_path, pooling, kinds)
    assert words in read_embedding_format(folder).why_not
    assert read_embedding_format(folder, "mean") == EmbeddingFormat("mean", "", 64), "the deployment has decided"


def test_without_these_files_it_is_the_last_token_s(tmp_path: Path) -> None:
    assert read_embedding_format(_write(tmp_path)) == EmbeddingFormat("last", "", 64)
    assert read_embedding_format(DEMO / "model").pooling == "last"


@pytest.mark.parametrize(
    ("config", "shorter"),
    [
        ({"matryoshka_dimensions": [32, 16]}, (32, 16)),
        ({"is_matryoshka": True}, ()),
        ({"is_matryoshka": False}, None),
        ({"text_config": {"hidden_size": 64, "is_matryoshka": True}}, ()),
    ],
)
def test_lengths_are_those_that_it_was_trained_for(
    tmp_path: Path, config: dict[str, Any], shorter: tuple[int, ...] | None
) -> None:
    assert read_embedding_format(_write(tmp_path, **config)) == EmbeddingFormat("last", "", 64, shorter)


@pytest.mark.parametrize("modules", ["{", "[1]", '[{"path": "x"}]', '{"a": 1}'])
def test_broken_files_stop_the_start(tmp_path: Path, modules: str) -> None:
    folder = _write(tmp_path)
    (folder / "modules.json").write_text(modules)
    with pytest.raises(DeploymentError, match=r"modules\.json"):
        read_embedding_format(folder)
