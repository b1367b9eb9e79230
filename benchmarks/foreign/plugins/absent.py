"""Stand-ins for packages that a suite imports and this environment does not have: the server's own, and PyTorch.

What a test file does with them while it is imported passes: it names types, makes constants and decorates. A test that
calls one is skipped, since it is of the server's parts and not of its API.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import pytest

_running = False
"""Whether tests run: before, test files are imported."""


class Absent:
    """Something of a package that is not here."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.__name__ = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if _running:
            skip(self._name)
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self  # as a decorator, or a value

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        return ()

    def __getitem__(self, key: Any) -> Absent:
        return self

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__

    def __add__(self, other: Any) -> Any:
        return self()

    def __iter__(self) -> Any:
        return iter(())


def skip(name: str) -> NoReturn:
    """Skip the test that runs, which needs something that is not here."""
    pytest.skip(f"it is of the server's own parts: it calls {name}")


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        absent = Absent(f"{self.__name__}.{name}")
        return type(name, (Exception,), {}) if name.endswith("Error") else absent


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str], known: Mapping[str, Mapping[str, Any]]) -> None:
        self._packages, self._known = packages, known
        self._here = [name for name, names in known.items() if "__path__" in names]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        absent = name in self._known or (_is_below(name, self._packages) and not _is_below(name, self._here))
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _AbsentModule(spec.name)
        module.__dict__.update(self._known.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _is_below(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def stand_in(packages: Sequence[str], known: Mapping[str, Mapping[str, Any]]) -> None:
    """Let imports of these packages succeed.

    Args:
        packages: their names, or those of parts of packages, such as ``tests.conftest``.
        known: by module, the names that are really here; with ``__path__`` what is below it is imported from there.
    """
    sys.meta_path.insert(0, _Finder(packages, known))


def tests_begin() -> None:
    """From now on a call of what is absent skips the test."""
    global _running
    _running = True
