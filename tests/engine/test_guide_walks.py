"""Walks in guides of schemas, by tokens that are drawn from what is allowed: what ends is valid, however spelled."""

from __future__ import annotations

import json
import random
import textwrap
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest

from inflight.errors import InvalidRequest
from tests.engine.support.guiding import guide_state, open_schema, walk

UNUSUAL = [
    *(f"{number}{'0' * 20}1" for number in ("0.1", "9.99", "0.5", "-0.25", "-7.125", "0.")),
    *("9" * 25, "0.99999999999999999999", "-0.0", "1e9", r'"\/', r'"\ud83d'),
]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("seed", "schemas"),
    [
        (40, 40),
        *((seed, 100) for seed in range(3)),
        *(pytest.param(seed, 100, marks=pytest.mark.release) for seed in range(3, 10)),
    ],
)
def test_every_walk_that_ends_is_valid(seed: int, schemas: int) -> None:
    source, outcomes = random.Random(seed), Counter[str]()
    while outcomes["schemas"] < schemas:
        schema = open_schema(source)
        try:
            guide_state("json_schema", json.dumps(schema))
        except InvalidRequest:
            outcomes["refused"] += 1
            continue
        outcomes["schemas"] += 1
        pieces = [*_spelled(_names(schema)), *UNUSUAL]
        for _ in range(3):
            text = walk(guide_state("json_schema", json.dumps(schema)), source, pieces)
            outcomes["walks that ended" if text is not None else "walks that did not"] += 1
            assert text is None or _is_valid(schema, text), (schema, text)
    assert outcomes["walks that ended"] > 2 * schemas, outcomes


def _names(schema: Any) -> set[str]:
    """Return the names of a schema's objects, whether of properties or of keywords."""
    inside = schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ()
    return set(schema if isinstance(schema, dict) else ()).union(*map(_names, inside))


def _spelled(names: Iterable[str]) -> Iterable[str]:
    """Yield names with the colon behind them: with few escapes, with more, and with nothing else."""
    for name in sorted(names):
        yield from (f"{json.dumps(name, ensure_ascii=ascii)}:" for ascii in (True, False))
        escaped = "".join(rf"\u{unit}" for unit in textwrap.wrap(name.encode("utf-16-be").hex(), 4))
        yield f'"{escaped}":'


def _is_valid(schema: Any, text: str) -> bool:
    """Return whether a text is valid, whichever of several values of one name a reader takes."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    first = json.loads(text, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    return validator.is_valid(json.loads(text)) and validator.is_valid(first)
