"""The import graph of the checkout's Python files; it reads them and imports none.

It needs the standard library and git alone: `.ci/run` asks which proofs a change reaches before anything is installed.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"[\w./-]*[/.][\w./-]*")
_IMPORT = re.compile(r"\b(?:from|import) ((?:inflight|benchmarks|tests)\b[\w.]*)(?: import ([\w, ]+))?")
_PROGRAM = re.compile(r"""with_name\("inflight"\)|"-m", "inflight"|bin/inflight|\.parent / "inflight\"""")


@functools.cache
def tracked_files(root: Path = ROOT) -> frozenset[str]:
    """Return the paths below ``root`` that git tracks or would add, relative to it.

    Raises:
        subprocess.CalledProcessError: ``root`` is in no git checkout.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return frozenset(path for path in listed if path and (root / path).is_file())


@dataclass(frozen=True)
class Source:
    """A Python file's words about other files."""

    imports: frozenset[str]
    """The modules that it may import, for type checking and in programs that are strings too: of ``from package import
    name`` both."""
    strings: frozenset[str]
    """Its string constants that may name a file or a module: of one word with a slash or a dot, or that a path is
    divided by, as in ``ROOT / "docs"``."""
    program: bool
    """Whether it runs the program ``inflight``."""


@functools.cache
def read_source(path: Path) -> Source:
    """Return what a file says. Raises SyntaxError."""
    text = path.read_text()
    imports, strings = set[str](), set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imports.update((str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _NAME.fullmatch(node.value):
                strings.add(node.value)
            for module, names in _IMPORT.findall(node.value):
                imports.update((module, *(f"{module}.{name.strip()}" for name in names.split(","))))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            strings.add(str(node.right.value))
    return Source(frozenset(imports), frozenset(strings), bool(_PROGRAM.search(text)))


def module_name(path: str) -> str:
    """Return the name under which a file, relative to the root, is imported."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def import_graph(paths: Iterable[str], root: Path = ROOT) -> dict[str, set[str]]:
    """Return, for each of the files, those of them that it imports; a deleted one imports nothing.

    All are paths relative to ``root``.
    """
    files = {module_name(path): path for path in paths}
    return {
        path: {files[name] for name in read_source(root / path).imports & files.keys()} - {path}
        if (root / path).is_file()
        else set()
        for path in files.values()
    }


def reachable(start: Iterable[str], graph: Mapping[str, Iterable[str]]) -> set[str]:
    """Return ``start`` and all that the graph leads to from there."""
    seen = set(start)
    todo = list(seen)
    while todo:
        new = set(graph.get(todo.pop(), ())) - seen
        seen |= new
        todo += new
    return seen


def backwards(graph: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Return the graph with its arrows turned round."""
    turned: dict[str, set[str]] = {}
    for source, targets in graph.items():
        for target in targets:
            turned.setdefault(target, set()).add(source)
    return turned
