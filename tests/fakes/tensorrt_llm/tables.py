"""Strict classes made from the recorded tables: what they do not list is an unknown argument."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

FACTS = Path(__file__).parents[2] / "facts"
LLM_ARGS = json.loads((FACTS / "llm_args.json").read_text())
LLM_API = json.loads((FACTS / "llm_api.json").read_text())
_TYPES: dict[str, Any] = {
    "int": int,
    "int bytes": int,
    "int>0": Annotated[int, Field(gt=0)],
    "int>=0": Annotated[int, Field(ge=0)],
    "int >=0": Annotated[int, Field(ge=0)],
    "bool": bool,
    "str": str,
    "float": float,
    "float 0..1": Annotated[float, Field(ge=0, le=1)],
    "str or Path": str | Path,
    "list[int]": list[int],
    "list[str]": list[str],
}


class Strict(BaseModel):
    """Base of the configuration classes: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", strict=False, arbitrary_types_allowed=True)


def names(*tables: str) -> list[str]:
    """Return the names of the arguments in the tables."""
    return [field["name"].split()[0] for table in tables for field in LLM_ARGS[table]]


def model(name: str, fields: list[dict[str, str]], base: type[Strict] = Strict) -> Any:
    """Make a class with these fields."""
    return create_model(name, __base__=base, **{_name(field): _field(field) for field in fields})


def _name(field: dict[str, str]) -> str:
    alias = re.search(r"\(alias (\w+)\)", field["name"])
    return alias[1] if alias else field["name"].split()[0]


def _field(field: dict[str, str]) -> tuple[Any, Any]:
    kind = field["type"]
    annotation = _annotation(kind.replace("?", "").strip())
    default = ... if field["default"] == "(required)" else _literal(field["default"])
    return (annotation | None if "?" in kind and annotation is not Any else annotation), default


def _annotation(kind: str) -> Any:
    if kind in _TYPES:
        return _TYPES[kind]
    choices = re.split(r", | or ", kind)
    return Literal[tuple(choices)] if len(choices) > 1 and all(map(str.isidentifier, choices)) else Any


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.split(" (")[0])
    except (ValueError, SyntaxError):
        return None if text.endswith("()") or text.startswith("None") else text
