"""Source files as syntax trees, each parsed once in a process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file; nobody changes it. Raises OSError and SyntaxError."""
    return ast.parse(path.read_text())
