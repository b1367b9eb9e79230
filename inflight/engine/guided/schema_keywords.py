"""The keywords of JSON Schema: where schemas stand inside of schemas, and which keywords nothing here enforces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

Path = tuple[str | int, ...]
"""The steps from the root of a schema to a place in it."""

_ONE = (
    "items additionalItems additionalProperties contains not if then else propertyNames unevaluatedItems "
    "unevaluatedProperties"
).split()
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAP = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
UNSERVED = {
    **dict.fromkeys("not if then else".split(), "a grammar cannot say what must not be"),
    **dict.fromkeys("dependentRequired dependentSchemas dependencies".split(), "what depends on another property"),
    **dict.fromkeys("contains minContains maxContains uniqueItems".split(), "what depends on all items at once"),
    "propertyNames": "the names of free properties; patternProperties with additionalProperties: false is enforced",
    **dict.fromkeys("unevaluatedItems unevaluatedProperties".split(), "what other keywords leave over"),
    **dict.fromkeys("$dynamicRef $recursiveRef".split(), "references that depend on where they are followed from"),
    **dict.fromkeys("disallow divisibleBy extends".split(), "keywords of draft 3"),
}
"""The keywords that assert something and cannot be enforced, with what they are about."""
KEYWORDS = frozenset(
    "type const enum required format pattern minLength maxLength minItems maxItems minProperties maxProperties minimum "
    "maximum exclusiveMinimum exclusiveMaximum multipleOf $ref $id id $schema $vocabulary $anchor $dynamicAnchor "
    "$recursiveAnchor $comment title description default examples deprecated readOnly writeOnly contentEncoding "
    "contentMediaType contentSchema".split()
).union(_ONE, _LIST, _MAP, UNSERVED)
"""All keywords of JSON Schema."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "minContains": (0,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
}
"""Values of such keywords that forbid nothing, and are left out."""


def asks_for_nothing(keyword: str, value: Any) -> bool:
    """Return whether a keyword that cannot be enforced forbids nothing with this value."""
    return any(type(one) is type(value) and one == value for one in _NEUTRAL.get(keyword, ()))


def children(schema: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas right inside of a schema, each with the steps to it."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _ONE and isinstance(value, dict | bool):
            yield (keyword,), value
        elif keyword in _LIST and isinstance(value, list):
            yield from (((keyword, index), one) for index, one in enumerate(value))
        elif keyword in _MAP and isinstance(value, dict):
            yield from (((keyword, name), one) for name, one in value.items() if isinstance(one, dict | bool))


def at(schema: Any, path: Path) -> Any:
    """Return what stands at a place of a schema. Raises LookupError: nothing does."""
    for step in path:
        if not isinstance(schema, dict if isinstance(step, str) else list):
            raise LookupError(step)
        schema = cast(Any, schema)[step]
    return schema


def pointer(path: Path) -> str:
    """Return the JSON pointer (RFC 6901) of a place; the root's is empty."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


def replaced(schema: Any, path: Path, value: Any) -> Any:
    """Return a schema that has ``value`` at a place; what lies beside the way there is shared with the given one."""
    if not path:
        return value
    copy = schema.copy()
    copy[path[0]] = replaced(schema[path[0]], path[1:], value)
    return copy
