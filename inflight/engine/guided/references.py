"""References inside of a schema (``$ref``): where they lead, and whether a schema stands there."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any
from urllib.parse import unquote

from inflight.engine.guided.refusals import refusal
from inflight.engine.guided.schema_keywords import KEYWORDS, Path, at, children

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


class References:
    """The references of one schema. Each must lead into this schema, to a place where a schema stands.

    That is where a keyword has one, or below a keyword that JSON Schema does not know, as ``components`` in OpenAPI.
    What lies elsewhere has another meaning already: ``#/properties`` is a map of schemas, ``#/enum/0`` is a value.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._base = next((one for one in (root.get("$id"), root.get("id")) if isinstance(one, str)), "").rstrip("#")
        self._places: dict[Path, tuple[Path, str]] = {}
        """The places that references lead to; with each the schema that has the first of them, and the reference."""
        self._anchors: list[tuple[Path, str]] = []
        self._next: list[Path] = []

    def follow(self, path: Path, reference: str) -> None:
        """Take in the reference of the schema at ``path``. Raises InvalidRequest: it leads nowhere."""
        inside = reference.removeprefix(self._base) if self._base else reference
        if inside == "#":
            return
        if not inside.startswith("#"):
            raise refusal(path, "$ref", f"{reference} leads out of the schema; only references into it are followed")
        if not inside.startswith("#/"):
            self._anchors.append((path, unquote(inside[1:])))
            return
        target = self._target(path, inside)
        if target not in self._places:
            self._places[target] = path, reference
            self._next.append(target)

    def next(self) -> Path | None:
        """Return a place that a reference leads to, each once; None: all have been returned."""
        return self._next.pop() if self._next else None

    def check(self, seen: Collection[Path], anchors: Collection[str], renamed: Collection[Path]) -> None:
        """Check where the references lead, once all schemas are known.

        Args:
            seen: the places of all schemas.
            anchors: their names.
            renamed: the schemas whose place has another name for llguidance.

        Raises:
            InvalidRequest: naming the schema that has the reference.
        """
        for path, anchor in self._anchors:
            if anchor not in anchors:
                raise refusal(path, "$ref", f"it refers to the anchor {anchor!r}, which no schema has")
        for target, (path, reference) in self._places.items():
            above = next(target[:size] for size in range(len(target) - 1, -1, -1) if target[:size] in seen)
            if not isinstance(at(self._root, target), dict | bool) or not self._leads(above, target[len(above) :]):
                raise refusal(path, "$ref", f"it refers to {reference}, where no schema stands")
            if any(target[: len(one)] == one for one in renamed):
                raise refusal(path, "$ref", f"{reference} leads into patternProperties, which is not supported")

    def _leads(self, above: Path, steps: Path) -> bool:
        schema = at(self._root, above)
        if any(steps == child for child, _ in children(schema)):
            return True
        return isinstance(schema, dict) and steps[0] not in KEYWORDS

    def _target(self, path: Path, pointer: str) -> Path:
        target: Path = ()
        for step in pointer[2:].split("/"):
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            inside = at(self._root, target)
            target = (*target, int(step) if isinstance(inside, list) and _INDEX.fullmatch(step) else step)
            try:
                at(self._root, target)
            except LookupError:
                raise refusal(path, "$ref", f"it refers to {pointer}, which the schema does not have") from None
        return target
