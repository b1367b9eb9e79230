"""JSON schemas whose every answer is short, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
_NAMES = ("name", "age", "city", "tags", "score", "is_open", "größe", "a b", "_id", "items", "unit", "when")


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_NAMES, draw.randint(1, 4))
    properties = {name: draw_schema(draw, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {"type": "array", "items": draw_schema(draw, depth - 1), "minItems": least, "maxItems": least + 2}


_LEAVES: tuple[Callable[[random.Random], Schema], ...] = (
    lambda draw: {"type": "string", "minLength": draw.randint(0, 3), "maxLength": draw.randint(4, 20)},
    lambda _: {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    lambda _: {"type": "string", "format": "date"},
    lambda draw: {"enum": draw.sample(["red", "green", "blau", 'a "b"', "\n", 1, None, True], 3)},
    lambda draw: {"type": "integer", "minimum": draw.randint(-50, 0), "maximum": draw.randint(1, 999)},
    lambda _: {"type": "number", "minimum": 0, "maximum": 1},
    lambda _: {"type": "boolean"},
    lambda _: {"const": {"kind": "fixed", "of": [1, 2.5]}},
    lambda _: {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
)


def draw_schema(draw: random.Random, depth: int) -> Schema:
    """Return a schema that nests so deep at most."""
    if depth > 0 and draw.random() < 0.4:
        return draw.choice((_object, _array))(draw, depth)
    return draw.choice(_LEAVES)(draw)


def schemas(count: int) -> list[Schema]:
    """Return schemas of objects, the same each time."""
    draw = random.Random(5)
    return [_object(draw, 3) for _ in range(count)]
