"""The quantized checkpoints to measure with: made once of each source."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quantized import quantized_checkpoint


class _Quantized:
    """In place of ModelOpt: what it saves names the source's weights."""

    def __init__(self, source: Path, *_: object) -> None:
        self._source = source

    def save(self, directory: Path) -> None:
        (directory / "config.json").write_bytes((self._source / "model.safetensors").read_bytes())


def test_one_of_a_source_that_has_changed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.quantized.QuantizedModel", _Quantized)
    source = tmp_path / "source"
    source.mkdir()
    made = []
    for weights in ("first", "first", "second"):
        (source / "model.safetensors").write_text(weights)
        made.append(quantized_checkpoint(tmp_path, source, "demo", "int8", ()))
    assert made[0] == made[1] != made[2]
    assert [(one / "config.json").read_text() for one in made] == ["first", "first", "second"]
