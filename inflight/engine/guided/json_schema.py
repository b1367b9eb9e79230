"""JSON Schema for llguidance: what a grammar cannot enforce is refused, with the keyword and where it stands.

llguidance enforces a schema or refuses it, with exceptions that are seen to here: keywords of draft 3 that it takes for
annotations; dates, times and patterns of ECMA-262 that it takes for others; bounds that it rounds; repeated names of
properties, which it counts each time; names with escapes. So an accepted text is always valid, at the price of some
valid texts that are refused: properties come in the schema's order, white space has a limit, and a character is written
in one way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from inflight.engine.guided.references import References
from inflight.engine.guided.refusals import refusal
from inflight.engine.guided.schema_keywords import (
    BOUNDS,
    UNSERVED,
    Path,
    asks_for_nothing,
    at,
    children,
    replaced,
)
from inflight.engine.guided.schema_values import (
    bounds_as_read,
    check_bound,
    check_constants,
    check_multiples,
    check_together,
)
from inflight.text.patterns import BadPattern, rust_pattern

_DRAFTS = ("2020-12", "2019-09", "draft-07", "draft-06", "draft-04")
_DEEPEST = 100
"""Schemas inside of schemas; llguidance takes 128 levels of JSON."""
_MOST_TRIALS = 200
"""Compilations by which the place of an error is looked for, at most."""
_WHITE_SPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
"""White space where JSON allows it: a line's end with an indent, or some spaces. Without a limit a model that begins to
repeat it may not find out of it."""
_ESCAPES = 'nrbtf\\"'
"""Escapes that texts may have. Without ``\\u`` each character is written in one way. So two names that are written
differently differ, and a name that the schema has cannot pass for a free one."""
_OPTIONS = {
    "whitespace_pattern": _WHITE_SPACE,
    "json_allowed_escapes": _ESCAPES,
    "lenient": False,
    "coerce_one_of": False,
}
_DATE = (
    r"([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}$"},
    "hostname": {"format": "hostname", "pattern": "^[0-9A-Za-z]+([.-][0-9A-Za-z]+)*$", "maxLength": 253},
}
"""What stands for a format. RFC 3339's forms have no leap seconds; llguidance's own allow 29 February in any year, and
22:30:60. A host's name has no two hyphens in a row, behind which labels of other alphabets (``xn--``) would begin."""

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
        raise refusal(*checked.as_given(place, keyword), error)
    return _form(checked.schema)


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
        """The places of all schemas."""
        self._anchors: set[str] = set()
        self._multiples: list[tuple[Path, Any]] = []
        """The places of ``multipleOf``, and its values."""
        self._applied: set[str] = set()
        """The keywords by which several schemas hold for one value."""
        self._references = References(self._root)
        self._patterns: dict[str, str] = {}
        """The patterns of properties as they are given, by what they are for llguidance."""
        self._renamed: set[Path] = set()
        """The places of schemas that another pattern leads to in ``schema``."""
        self._added: dict[Path, str] = {}
        """The places in ``schema`` that the given one does not have, with the keyword that they stand for."""
        if "x-guidance" in self._root:
            raise refusal((), "x-guidance", "these options are the server's")
        if "draft-03" in str(self._root.get("$schema")):
            raise refusal((), "$schema", "draft 3 is not supported")
        self._check((), schema)
        while (path := self._references.next()) is not None:
            if path not in self._seen:
                self._check(path, at(self._root, path))
        self._references.check(self._seen, self._anchors, self._renamed)
        if "$ref" in self._applied or (self._applied and len(self._multiples) > 1):
            check_multiples(self._multiples)
        self.schema = self._written((), schema)

    def as_given(self, path: Path, keyword: str | None) -> tuple[Path, str | None]:
        """Return where in the given schema a place of ``schema`` is, and a keyword of it."""
        for size in range(len(path) + 1):
            if (added := self._added.get(path[:size])) is not None:
                path, keyword = path[: size - 2], added
                break
        return tuple(self._patterns.get(step, step) if isinstance(step, str) else step for step in path), keyword

    def _check(self, path: Path, schema: Any) -> None:
        """Check a schema with all those that lie inside."""
        self._seen.add(path)
        if len(path) > _DEEPEST:
            raise refusal(path[:20], None, f"it lies more than {_DEEPEST} steps deep")
        if not isinstance(schema, dict):
            return
        for keyword, value in schema.items():
            self._check_keyword(path, keyword, value)
        check_together(path, schema)
        self._check_patterns(path, schema)
        for steps, child in children(schema):
            self._check((*path, *steps), child)

    def _check_keyword(self, path: Path, keyword: str, value: Any) -> None:
        if keyword in UNSERVED and not asks_for_nothing(keyword, value):
            raise refusal(path, keyword, f"it cannot be enforced ({UNSERVED[keyword]})")
        if keyword in BOUNDS:
            check_bound(path, keyword, value)
        if keyword == "multipleOf":
            self._multiples.append((path, value))
        if keyword in ("$ref", "allOf", "anyOf", "oneOf"):
            self._applied.add(keyword)
        if keyword in ("const", "enum"):
            check_constants(path, keyword, value)
        if keyword in ("$id", "id", "$anchor", "$dynamicAnchor") and isinstance(value, str):
            self._check_identifier(path, keyword, value)
        if path and keyword == "$schema" and _age(value) < _age(self._root.get(keyword)):
            raise refusal(path, keyword, "a newer draft inside of a schema changes what keywords mean")
        if (
            keyword.startswith("content")
            and keyword != "contentSchema"
            and "draft-07" in str(self._root.get("$schema"))
        ):
            raise refusal(path, keyword, "it cannot be enforced")
        if keyword == "$ref" and isinstance(value, str):
            self._references.follow(path, value)

    def _check_identifier(self, path: Path, keyword: str, value: str) -> None:
        if "nchor" in keyword or value.startswith("#"):
            self._anchors.add(value.removeprefix("#"))
        elif path:
            raise refusal(path, keyword, "an identifier inside of a schema changes what references mean")

    def _check_patterns(self, path: Path, schema: dict[str, Any]) -> None:
        if isinstance(schema.get("pattern"), str):
            _pattern(path, "pattern", schema["pattern"])
        if not isinstance(named := schema.get("patternProperties"), dict):
            return
        renamed = {_pattern(path, "patternProperties", name): name for name in named}
        if len(renamed) < len(named):
            raise refusal(path, "patternProperties", "two patterns mean the same")
        self._patterns |= renamed
        self._renamed |= {(*path, "patternProperties", name) for pattern, name in renamed.items() if pattern != name}

    def _written(self, path: Path, value: Any) -> Any:
        """Return a part of the schema as llguidance reads it."""
        if isinstance(value, list):
            return [self._written((*path, index), one) for index, one in enumerate(value)]
        if not isinstance(value, dict):
            return value
        made = {key: self._written((*path, key), one) for key, one in value.items()}
        return self._rewritten(path, made) if path in self._seen else made

    def _rewritten(self, path: Path, schema: dict[str, Any]) -> dict[str, Any]:
        made = {key: value for key, value in schema.items() if key not in UNSERVED and key != "contentSchema"}
        if path:
            made.pop("$schema", None)  # keywords of an older draft hold as those of the schema's own
        if isinstance(schema.get("pattern"), str):
            made["pattern"] = _pattern(path, "pattern", schema["pattern"])
        if isinstance(named := schema.get("patternProperties"), dict):
            made["patternProperties"] = {_pattern(path, "patternProperties", name): one for name, one in named.items()}
        added = bounds_as_read(made)
        if isinstance(schema.get("format"), str) and (form := _FORMATS.get(schema["format"])) is not None:
            del made["format"]
            added.append(("format", form))
        others = schema.get("allOf", [])
        if added and isinstance(others, list):
            made["allOf"] = [*others, *(one for _, one in added)]
            places = ((*path, "allOf", len(others) + index) for index in range(len(added)))
            self._added |= dict(zip(places, (keyword for keyword, _ in added), strict=True))
        return made


def _age(draft: Any) -> int:
    """Return how many drafts of JSON Schema are newer than the one that ``$schema`` says; without it, none is."""
    return next((age for age, name in enumerate(_DRAFTS) if f"/{name}/" in str(draft)), 0)


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
