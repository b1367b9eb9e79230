"""config.json is a stranger's file: whatever a value of it is, it is read, or refused in one short line, at once."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.engine.models.reading import is_known, read_model_config
from inflight.engine.models.rope import RotaryEmbedding
from inflight.errors import DeploymentError

CONFIGS = sorted((Path(__file__).parents[1] / "facts/published_configs").glob("*.json"))
OF_OTHERS = ("vision_config", "audio_config", "quantization_config")
VALUES: list[Any] = [
    None, [], {}, "", -1, 0, 1, 0.5, 1e308, 1e-320, 10**6, 10**9, 2**62, float("nan"), float("inf"), True, [[]],
    [10**9], {"a": {"b": 1}}, "x\n\x1b[31m", "x" * 10_000, ["full_attention"] * 5_000, [1.0] * 5_000,
]  # fmt: skip
LONGEST_S = 10.0
"""Of what takes milliseconds; a hang, or a model of a million layers, takes minutes."""


def _published() -> dict[str, dict[str, Any]]:
    read = {path.stem: json.loads(path.read_text())["config"] for path in CONFIGS}
    return {name: config for name, config in read.items() if is_known(config)}


PUBLISHED = _published()


def _places(data: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in data.items():
        if name not in OF_OTHERS:
            yield (*above, name)
            if isinstance(value, dict):
                yield from _places(value, (*above, name))


def _with(data: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = inner = copy.deepcopy(data)
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return changed


def _read(data: dict[str, Any]) -> None:
    """Read a configuration, and compute what is computed of it before there are weights."""
    config = read_model_config(data)
    length = config.max_position_embeddings
    for one in {str(one.rope): one for one in config.attention.values() if one.rope}.values():
        assert RotaryEmbedding(one.rope or {}, one.rope_dim, length, length).frequencies.isfinite().all()


@pytest.mark.proof
@pytest.mark.parametrize("family", sorted(PUBLISHED))
def test_any_value_in_place_of_another_is_read_or_refused_in_one_line(family: str) -> None:
    drawn, said = random.Random(family), []
    started = time.process_time()
    for place in _places(PUBLISHED[family]):
        try:
            _read(_with(PUBLISHED[family], place, drawn.choice(VALUES)))
        except DeploymentError as error:
            said.append(str(error))
    assert time.process_time() - started < LONGEST_S
    assert said
    assert all(line.isprintable() and len(line) < 2100 for line in said)
