"""The one rule for fields, held for every field of every API: a demand is obeyed or refused, a hint never refuses."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest

import inflight.gateway
from inflight.gateway.errors import ApiError
from inflight.gateway.fields import Field, Reader, State
from scripts.fields_page import TABLES
from tests.support.tables import each_row

SAMPLES: tuple[Any, ...] = (True, 3, 0.5, "auto", "left", "float", [], {}, ["text"], [3], [{}], {"include_usage": True})
"""Values of all types of JSON; every kind takes one of them."""
WISHES = (
    "reasoning_effort verbosity store service_tier prediction web_search_options prompt_cache_retention "
    "safety_identifier context_management thinking_token_budget speed truncation compaction diagnostics"
).split()
"""Fields that do not change what an answer means."""


def readers() -> Iterator[tuple[str, Reader]]:
    """Yield every reader of bodies that a module of the gateway has, with its name."""
    for module in pkgutil.walk_packages(inflight.gateway.__path__, "inflight.gateway."):
        if module.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Reader):
                yield f"{module.name.removeprefix('inflight.gateway.')}.{name}", value


READERS = {id(reader.fields): (name, reader) for name, reader in readers()}
ROWS = [(name, reader, field) for name, reader in READERS.values() for field in reader.fields.values()]


def of_state(*states: State) -> list[tuple[str, Reader, Field]]:
    return [row for row in ROWS if row[2].state in states]


def values_of(field: Field) -> list[Any]:
    """Return the samples that a field's kind takes."""
    good = []
    for value in SAMPLES:
        try:
            field.kind.read(value, field.name)
        except ApiError:
            continue
        good.append(value)
    return good


def body_of(reader: Reader, field: Field, value: Any) -> dict[str, Any]:
    """Return a body with all that is required, and a value of a field."""
    needed = {name: values_of(reader.fields[name])[0] for name in reader.required}
    return needed | {field.name: value}


def test_every_table_of_the_docs_is_read_by_a_reader() -> None:
    assert {id(table) for table in TABLES.values()} <= set(READERS)
    assert {field.state for _, _, field in ROWS} == set(get_args(State))


def test_what_is_a_hint_to_one_api_is_refused_by_none() -> None:
    states: dict[str, set[str]] = {}
    for _, _, field in ROWS:
        states.setdefault(field.name, set()).add(field.state)
    assert not [name for name, found in states.items() if {"hint", "refused"} <= found]
    assert not [name for name in WISHES if "hint" not in states[name]]


@each_row("name, reader, field", of_state("hint"))
def test_a_hint_refuses_no_request(name: str, reader: Reader, field: Field) -> None:
    assert field.doc
    values = [*values_of(field), *field.neutral]
    assert values
    for value in values:
        body, met = body_of(reader, field, value), field.is_met(value)
        left = reader.read(body)
        assert (left.ignored, field.name in left) == (() if met else (field.name,), met), value
        obeyed = reader.read(body, obeys=lambda name, value: {}, strict=True)
        assert (obeyed.ignored, field.name in obeyed) == ((), True), value
        if not met:
            with pytest.raises(ApiError) as caught:
                reader.read(body, strict=True)
            assert (caught.value.status, caught.value.param) == (400, field.name)


@each_row("name, reader, field", of_state("refused"))
def test_a_demand_that_is_not_served_is_refused(name: str, reader: Reader, field: Field) -> None:
    assert field.doc
    for value in SAMPLES:
        body = body_of(reader, field, value)
        if field.is_met(value):
            assert field.name not in reader.read(body, strict=True)
            continue
        with pytest.raises(ApiError) as caught:
            reader.read(body)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field.name)


@each_row("name, reader, field", of_state("served", "accepted"))
def test_what_is_served_is_never_ignored(name: str, reader: Reader, field: Field) -> None:
    assert field.doc
    values = values_of(field)
    assert values
    assert field.neutral == ()
    for value in values:
        read = reader.read(body_of(reader, field, value))
        assert field.name in read
        assert field.name not in read.ignored


def inner_fields(shape: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path of everything below a field that its shape declares."""
    for name, inner in shape.items():
        yield f"{path}.{name}", inner
        if isinstance(inner, Mapping):
            yield from inner_fields(inner, f"{path}.{name}")


def test_what_stands_inside_of_a_field_is_known_refused_or_a_hint() -> None:
    for _, _, field in ROWS:
        for path, inner in inner_fields(field.inside or {}, field.name):
            assert inner is None or isinstance(inner, Mapping) or inner.state in ("refused", "hint"), path
