"""Reads nested JSON of a request's body step by step, so that every refusal names the path of the value at fault.

A field that is null counts as absent, since clients send unset fields so. Fields that nobody knows are collected by
their paths; a header of the response names them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from inflight.gateway.errors import ApiError, invalid
from inflight.gateway.fields import unserved
from inflight.gateway.values import Kind, list_of, same, string, wrong

_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}


class JsonValue:
    """A value of the body, with its path, such as ``input[2].content[0]``."""

    __slots__ = ("ignored", "path", "value")

    def __init__(self, value: Any, path: str, ignored: list[str]) -> None:
        """
        Args:
            value: as JSON has it.
            path: where it stands in the body.
            ignored: takes the paths of fields that are not known, of this value and all below it.
        """
        self.value, self.path, self.ignored = value, path, ignored

    def error(self, problem: str) -> ApiError:
        """Return the error that this value has a ``problem``, such as "is empty"."""
        return invalid(f"{self.path} {problem}", self.path)

    def refusal(self, reason: str) -> ApiError:
        """Return the error of a value that asks for what is not served, for a ``reason``."""
        return unserved(self.value, self.path, reason)

    def get(self, name: str) -> JsonValue | None:
        """Return a field of an object; None where it is absent or null. Raises ApiError: this is no object."""
        value = self.object().get(name)
        return None if value is None else JsonValue(value, f"{self.path}.{name}", self.ignored)

    def need(self, name: str) -> JsonValue:
        """Return a field of an object. Raises ApiError: it is absent or null."""
        field = self.get(name)
        if field is None:
            path = f"{self.path}.{name}"
            raise invalid(f"{path} is missing", path, "missing_required_parameter")
        return field

    def only(self, known: Collection[str]) -> None:
        """Collect the fields that are not ``known`` and not null."""
        for name, value in self.object().items():
            if name not in known and value is not None:
                self.ignored.append(f"{self.path}.{name}")

    def elements(self) -> list[JsonValue]:
        """Return the elements of a list. Raises ApiError: it is none."""
        values: list[Any] = self._checked(list)
        return [JsonValue(value, f"{self.path}[{index}]", self.ignored) for index, value in enumerate(values)]

    def object(self) -> dict[str, Any]:
        """Return an object. Raises ApiError: it is none."""
        return self._checked(dict)

    def text(self) -> str:
        """Return a string. Raises ApiError: it is none."""
        return self._checked(str)

    def name(self) -> str:
        """Return a string that is not empty. Raises ApiError: it is none."""
        if not self.text():
            raise self.error("is empty")
        return self.text()

    def read(self, kind: Kind) -> Any:
        """Return the value, which must be of a ``kind``. Raises ApiError: it is not."""
        return kind.read(self.value, self.path)

    def left_out(self, *met: Any) -> None:
        """Leave out a hint, and name it unless its value is one of those that are ``met`` anyway."""
        if not any(same(self.value, one) for one in met):
            self.ignored.append(self.path)

    def accept(self, reason: str, *neutral: Any) -> None:
        """Accept values that ask for nothing. Raises ApiError: any other is not supported, for a ``reason``."""
        if not any(same(self.value, one) for one in neutral):
            raise self.refusal(reason)

    def _checked(self, kind: type) -> Any:
        if not isinstance(self.value, kind):
            raise wrong(self.path, self.value, _NAMES[kind])
        return self.value


def check_callers(callers: JsonValue) -> None:
    """Check who may call a tool. Raises ApiError: the model may not, and nobody else is there."""
    if callers.read(list_of(string(), 16)) and "direct" not in callers.value:
        raise callers.refusal("the model is the only caller")
