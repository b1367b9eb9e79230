"""The environment of chat templates: Jinja's sandbox, with bounds on what a rendering computes and makes.

The sandbox keeps a template from what it must not reach, but not from ``"a" * 10**10`` or loops without end, in which
no other thread of the process may run. Here a template has the methods and filters of a list, and everything that
it does takes its cost (``template_costs``) from a budget (``template_budget``) before it is done.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any, cast

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.runtime import Macro
from jinja2.visitor import NodeTransformer

from inflight.text.output.incremental_json import escape_surrogates
from inflight.text.template_budget import LARGEST, Steps, TooMuch, elements, listed, spend, weight
from inflight.text.template_costs import (
    FILTERS,
    MAKES_NUMBERS,
    METHODS,
    OWN,
    check_form,
    check_number,
    field_cost,
    filter_cost,
    made,
    method_cost,
    operator_cost,
)

_STEPS, _JOINED, _MADE, _COMPARED, _SOUGHT, _SLICED = "_steps", "_joined", "_made", "_compared", "_sought", "_sliced"


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose templates are bounded, within ``budget``."""

    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, **options)
        del self.globals["lipsum"]
        self.globals["dict"] = _new_dict
        known: dict[str, Callable[..., Any]] = {**self.filters, "tojson": to_json}
        self.filters = {name: _bounded(name, known[name]) for name in FILTERS} | {
            _STEPS: Steps, _JOINED: _joined, _MADE: _new, _COMPARED: _compared, _SOUGHT: _sought, _SLICED: made
        }  # fmt: skip
        self.tests = {name: _bounded_test(cast(Callable[..., Any], one)) for name, one in self.tests.items()}

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """Return the text of a template's, macro's or block's parts."""
        spend_, kept, size = spend(), list[str](), 0
        for part in parts:
            spend_.take(len(part))
            kept.append(part)
            size += len(part)
            if size > LARGEST:
                raise TooMuch(f"it makes a text of more than {LARGEST} characters")
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return what an operator makes of two values."""
        if operator == "+" and type(left) is type(right) is str:  # most are
            spend().take(len(left) + len(right))
            return left + right
        spend().take(operator_cost(operator, left, right))
        result = super().call_binop(context, operator, left, right)
        check_number(result)
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what a function, macro or method returns."""
        value = getattr(__obj, "__self__", None)
        if isinstance(value, str):
            args = tuple(map(listed, args)) if args else ()
            spend().take(method_cost(__obj.__name__, value, [*args, *kwargs.values()]))
        elif isinstance(value, list | tuple):
            _compared(value)
        elif not isinstance(__obj, Macro) and not isinstance(value, dict):
            _compared([*args, *kwargs.values()])
            for one in args:
                check_number(one)
        return made(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may have an attribute."""
        if (methods := METHODS.get(type(obj))) is not None:
            return attr in methods
        return isinstance(obj, OWN) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return ``str.format`` or ``str.format_map`` with the sandbox's access to attributes, and costs of fields."""
        if not isinstance(value, BuiltinMethodType | MethodType) or value.__name__ not in ("format", "format_map"):
            return None
        form, name = value.__self__, value.__name__
        if not isinstance(form, str):
            return None
        escape = getattr(form, "escape", None)
        formatter = _MarkupFormatter(self, escape=escape) if escape else _Formatter(self)

        def whole(*args: Any, **kwargs: Any) -> str:
            spend().take(check_form(form))
            return type(form)(formatter.vformat(form, args, kwargs))

        def of_map(values: Mapping[str, Any]) -> str:
            return whole(**values)

        return whole if name == "format" else of_map

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Return the tree of a template, in which loops and what makes values without a call are calls of filters."""
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree


class _CountedFields:
    """The fields of a format, each of which takes its cost from the budget."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        spend().take(weight(value, shown=True))
        return super().convert_field(value, conversion)  # type: ignore[misc]

    def format_field(self, value: Any, format_spec: str) -> Any:
        spend().take(field_cost(value, format_spec))
        return super().format_field(value, format_spec)  # type: ignore[misc]


class _Formatter(_CountedFields, jinja2.sandbox.SandboxedFormatter):
    pass


class _MarkupFormatter(_CountedFields, jinja2.sandbox.SandboxedEscapeFormatter):
    pass


class _Counting(NodeTransformer):
    """Puts filters around what must take from the budget."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _STEPS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _COMPARED)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _SOUGHT if operand.op in ("in", "notin") else _COMPARED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _SLICED) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if node.ctx == "load" else node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _joined(values: tuple[Any, ...]) -> str:
    """Return the texts of values in one (the operator ``~``)."""
    texts = [str(_shown(value)) for value in values]
    spend().take(sum(map(len, texts)))
    return "".join(texts)


def _new(value: Any) -> Any:
    """Return a new list, tuple or object, which must not have too much in it."""
    elements(value)
    return value


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a new object; each key is a step, as keys may collide."""
    new = dict[Any, Any]()
    for one in args:
        for pair in Steps(one.items() if isinstance(one, dict) else one):
            key, value = pair
            check_number(key)
            new[key] = value
    new.update(kwargs)
    return _new(new)  # type: ignore[no-any-return]


def _shown(value: Any) -> Any:
    """Return a value of which text is to be made."""
    if not isinstance(value, str | int | None):
        spend().take(weight(value, shown=True))
    return value


def _compared(value: Any) -> Any:
    """Return a value that is read to its end without a step, such as an operand of a comparison."""
    if isinstance(value, str):
        spend().step(1 + len(value) // 1024)
    elif not isinstance(value, int | None):
        spend().step(1 + weight(value) // 1024)
    return value


def _sought(value: Any) -> Any:
    """Return a value in which another is looked for."""
    return _compared(listed(value))


def _bounded(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that takes from the budget."""
    leading, order = hasattr(apply, "jinja_pass_arg"), _parameters(apply)

    @functools.wraps(apply)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, others = listed(args[leading]), list(map(listed, args[leading + 1 :]))
        given = [*others, *(kwargs[one] for one in order if one in kwargs)] if kwargs else others
        spend().take(filter_cost(name, value, given))
        result = made(apply(*args[:leading], value, *others, **kwargs))
        if name in MAKES_NUMBERS:
            check_number(result)
        return result

    return bounded


def _parameters(apply: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(apply).parameters)
    except ValueError:  # of C code, which has no names of parameters
        return []


def _bounded_test(test: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test whose operands take from the budget, if it compares two or reads a text."""

    @functools.wraps(test)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        for one in args:
            if len(args) > 1 or isinstance(one, str):
                _compared(one)
        return test(*args, **kwargs)

    return bounded


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Sequence[str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON: Jinja's own ``tojson`` escapes for HTML. Halves of surrogate pairs are escaped."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=cast(Any, separators), sort_keys=sort_keys
    )
    parts = [encoder.encode(value)] if indent is None else map(made, encoder.iterencode(value))
    return escape_surrogates("".join(parts))
