"""JSON Schema for llguidance: what a grammar cannot enforce is refused, with the keyword and where it stands.

llguidance enforces a schema or refuses it, with exceptions that are seen to here: keywords of draft 3 that it takes for
annotations; dates, times and patterns of ECMA-262 that it takes for others; bounds that it rounds; repeated names of
properties, which it counts each time. So an accepted text is always valid, at the price of some valid texts that are
refused: properties come in the schema's order, and white space has a limit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from inflight.engine.guided.patterns import BadPattern, rust_pattern
from inflight.engine.guided.schema_keywords import (
    BOUNDS,
    UNSERVED,
    Path,
    asks_for_nothing,
    at,
    children,
    pointer,
    replaced,
    with_children,
)
from inflight.errors import InvalidRequest

_LARGEST_INTEGER = 2**53
_DEEPEST = 100
"""Schemas inside of schemas; llguidance takes 128 levels of JSON."""
_MOST_TRIALS = 200
"""Compilations by which the place of an error is looked for, at most."""
_WHITE_SPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
"""White space where JSON allows it: a line's end with an indent, or some spaces. Without a limit a model that begins to
repeat it may not find out of it."""
_OPTIONS = {"whitespace_pattern": _WHITE_SPACE, "lenient": False, "coerce_one_of": False}
_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""RFC 3339's forms without leap seconds; llguidance's own allow 29 February in any year, and 22:30:60."""

_NAMED = {"oneOf": "oneOf", "patternProperty": "patternProperties", "Unknown format": "format"}
"""How llguidance's errors about several schemas begin, and the keyword that they are about."""


def schema_grammar(schema: Any, error_of: Callable[[str], str | None]) -> str:
    """Return llguidance's form of a schema: JSON, to stand behind ``%json``.

    Args:
        schema: as JSON has been read.
        error_of: returns why llguidance refuses such a form, in one line, or None.

    Raises:
        InvalidRequest: the schema cannot be enforced; it names the keyword and the JSON pointer of its schema.
    """
    checked = _Checked(schema)
    if (error := error_of(_form(checked.schema))) is not None:
        place, keyword = _find(checked.schema, error, error_of)
        raise refusal(checked.as_given(place), keyword, error)
    return _form(checked.schema)


def refusal(place: Path, keyword: str | None, reason: str) -> InvalidRequest:
    """Return the error of a keyword, or of a schema as a whole, that cannot be enforced."""
    what = "the schema" if keyword is None else keyword
    return InvalidRequest(f"guided_decoding_guide: {what} at {pointer(place) or 'the root'}: {reason}")


def _form(schema: Any) -> str:
    whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return json.dumps({"x-guidance": _OPTIONS, **whole})


class _Checked:
    """A schema of which every part has been checked, and written as llguidance reads it: ``schema``."""

    def __init__(self, schema: Any) -> None:
        if not isinstance(schema, dict | bool):
            raise refusal((), None, "a JSON object, true or false is expected")
        self._root = schema if isinstance(schema, dict) else {}
        self._seen: set[Path] = set()
        self._refs: list[Path] = []
        self._patterns: dict[str, str] = {}
        """The patterns of properties as they are written, by what they are for llguidance."""
        if "x-guidance" in self._root:
            raise refusal((), "x-guidance", "these options are the server's")
        if "draft-03" in str(self._root.get("$schema")):
            raise refusal((), "$schema", "draft 3 is not supported")
        self.schema = self._check((), schema)
        while self._refs:  # a reference may lead to where no keyword says that there is a schema
            path = self._refs.pop()
            if path not in self._seen:
                self.schema = replaced(self.schema, path, self._check(path, at(self._root, path)))

    def as_given(self, path: Path) -> Path:
        """Return where in the given schema a place of ``schema`` is."""
        return tuple(self._patterns.get(step, step) if isinstance(step, str) else step for step in path)

    def _check(self, path: Path, schema: Any) -> Any:
        """Return a part of the schema as llguidance reads it, with all that lies inside."""
        self._seen.add(path)
        if len(path) > _DEEPEST:
            raise refusal(path[:20], None, f"it lies more than {_DEEPEST} steps deep")
        if not isinstance(schema, dict):
            return schema
        for keyword, value in schema.items():
            self._check_keyword(path, keyword, value)
        _check_together(path, schema)
        return self._rewritten(path, with_children(schema, lambda steps, child: self._check((*path, *steps), child)))

    def _check_keyword(self, path: Path, keyword: str, value: Any) -> None:
        if keyword in UNSERVED and not asks_for_nothing(keyword, value):
            raise refusal(path, keyword, f"it cannot be enforced ({UNSERVED[keyword]})")
        if keyword in BOUNDS:
            _check_bound(path, keyword, value)
        if keyword in ("const", "enum"):
            _check_constants(path, keyword, value)
        if path and keyword in ("$id", "id") and isinstance(value, str) and not value.startswith("#"):
            raise refusal(path, keyword, "an identifier inside of a schema changes what references mean")
        if (
            keyword.startswith("content")
            and keyword != "contentSchema"
            and "draft-07" in str(self._root.get("$schema"))
        ):
            raise refusal(path, keyword, "it cannot be enforced")
        if keyword == "$ref" and isinstance(value, str):
            self._follow(path, value)

    def _rewritten(self, path: Path, schema: dict[str, Any]) -> dict[str, Any]:
        made = {key: value for key, value in schema.items() if key not in UNSERVED}
        if isinstance(schema.get("pattern"), str):
            made["pattern"] = _pattern(path, "pattern", schema["pattern"])
        if isinstance(named := schema.get("patternProperties"), dict):
            renamed = {_pattern(path, "patternProperties", name): name for name in named}
            if len(renamed) < len(named):
                raise refusal(path, "patternProperties", "two patterns mean the same")
            self._patterns |= renamed
            made["patternProperties"] = {pattern: named[name] for pattern, name in renamed.items()}
        if isinstance(schema.get("format"), str) and (form := _FORMATS.get(schema["format"])) is not None:
            del made["format"]
            others = schema.get("allOf", [])
            made["allOf"] = [*others, {"pattern": form}] if isinstance(others, list) else others
        return made

    def _follow(self, path: Path, reference: str) -> None:
        base = self._root.get("$id") or self._root.get("id")
        if isinstance(base, str) and reference.startswith(base.rstrip("#") + "#"):
            reference = reference[len(base.rstrip("#")) :]
        if not reference.startswith("#/"):
            return  # the root, an anchor, or what llguidance refuses
        steps = [unquote(step).replace("~1", "/").replace("~0", "~") for step in reference[2:].split("/")]
        target: Path = ()
        for step in steps:
            inside = at(self._root, target)
            target = (*target, int(step) if isinstance(inside, list) and step.isdigit() else step)
            try:
                at(self._root, target)
            except LookupError:
                raise refusal(path, "$ref", f"it refers to {reference}, which the schema does not have") from None
        self._refs.append(target)


def _check_bound(path: Path, keyword: str, value: Any) -> None:
    """Refuse a bound that is no double: llguidance would take the nearest one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return  # llguidance says what is wrong
    try:
        exact = math.isfinite(value) and (isinstance(value, float) or int(float(value)) == value)
    except OverflowError:
        exact = False
    if not exact:
        raise refusal(path, keyword, f"{value} has too many digits to be enforced exactly")


def _check_constants(path: Path, keyword: str, value: Any) -> None:
    """Refuse integers that a double may not hold: llguidance (1.9.1) rounds them, or ends the process (-2**63)."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict | list):
            rest.extend(one.values() if isinstance(one, dict) else one)
        elif isinstance(one, int) and abs(one) > _LARGEST_INTEGER:
            raise refusal(path, keyword, f"{one} has too many digits to be enforced exactly")


def _check_together(path: Path, schema: dict[str, Any]) -> None:
    """Refuse keywords that are not enforced beside others.

    A least number of properties could be made up by repeated names; items of another schema could pass for additional.
    """
    if "additionalItems" in schema and not schema.keys().isdisjoint(("allOf", "anyOf", "oneOf", "$ref")):
        raise refusal(path, "additionalItems", "it cannot be enforced beside allOf, anyOf, oneOf or $ref")
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    if isinstance(least, int) and isinstance(required, list | tuple) and least > len(required) + 1:
        raise refusal(path, "minProperties", f"it can be enforced up to {len(required) + 1}: `required` and one more")


def _pattern(path: Path, keyword: str, pattern: str) -> str:
    try:
        return rust_pattern(pattern)
    except BadPattern as error:
        raise refusal(path, keyword, str(error)) from None


def _find(schema: Any, error: str, error_of: Callable[[str], str | None]) -> tuple[Path, str | None]:
    """Return the place of llguidance's error, and the keyword: without them there would be another error, or none."""
    trials = 0

    def is_cause(path: Path, value: Any) -> bool:
        nonlocal trials
        trials += 1
        return trials <= _MOST_TRIALS and error_of(_form(replaced(schema, path, value))) != error

    def cause_inside(place: Path) -> Path | None:
        nonlocal schema
        inside, whole = [(*place, *steps) for steps, _ in children(at(schema, place))], schema
        if (alone := next((path for path in inside if is_cause(path, True)), None)) is not None:
            return alone
        for path in inside:  # several may have the same error: the last of them is found without the others
            if is_cause(path, True):
                return path
            schema = replaced(schema, path, True)
        schema = whole
        return None

    place: Path = ()
    while (inner := cause_inside(place)) is not None:
        place = inner
    for length in range(len(place), -1, -1):  # an error about several schemas names the keyword that has them
        above = at(schema, place[:length])
        for name, keyword in _NAMED.items():
            if error.startswith(name) and isinstance(above, dict) and keyword in above:
                return place[:length], keyword
    found = at(schema, place)
    for keyword in found if isinstance(found, dict) else ():
        if is_cause(place, {key: value for key, value in found.items() if key != keyword}):
            return place, keyword
    return place, None
