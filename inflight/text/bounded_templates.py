"""The environment of chat templates: Jinja's sandbox, with bounds on what a rendering computes and makes.

The sandbox keeps a template from what it must not reach, but not from ``"a" * 10**10`` or loops without end, in which
no other thread of the process may run. Here loops, calls, filters and operators take from a budget of processor time
and of characters; what could make much out of little is measured before it is done.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import jinja2
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from inflight.text.output.incremental_json import escape_surrogates

RENDER_S = 1.0
"""Seconds of processor time that one rendering may take."""
AT_ONCE_S = 0.02
"""Seconds of it where others wait for the thread."""
_CHARACTERS = 128 << 20
"""Characters of text, and elements of lists, that a rendering may make in all its steps."""
_WORK_UNSEEN = 16
"""Steps, or KiB that are made, of some microseconds each."""
_LARGEST_NUMBER = 1_000_000
"""The largest width or number of repetitions that a call or a filter may be given."""
_LARGEST_BITS = 1_000_000
_ELEMENTS = 1_000_000
"""The most elements of a new list or object, at any depth; a shared part counts each time."""
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{6}|\*)|\{[^{}:!]*[:!][^{}]*\d{6}|\{[^{}]*\{")
"""Matches a format with a width that is large, or is given beside it.

No other thread runs during a search, so its time must be linear: each repetition can stop in one place only."""
_OF_LISTS = frozenset(
    "length count list first last map select reject selectattr rejectattr items reverse batch slice default d attr "
    "random".split()
)
"""The filters that do not read what is in the elements that they are given."""
_COMPARE = frozenset("dictsort groupby max min sort sum unique".split())
"""The filters that copy, compare or add these."""
_NEVER = frozenset({"translate", "maketrans", "to_bytes"})
_STEPS, _JOINED, _MADE, _COMPARED, _SLICED = "_steps", "_joined", "_made", "_compared", "_sliced"


class TooMuch(jinja2.TemplateRuntimeError):
    """A template computes or makes more than it may."""


class TakesLonger(BaseException):
    """A rendering has taken the time that it has where others wait for the thread: no error, and not answered."""


class _Budget:
    """The processor time and the characters that are left to one rendering."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until, self._left = time.thread_time() + seconds, _CHARACTERS
        self._unseen = 0

    def step(self, work: int = 1) -> None:
        """Take a step; the clock is looked at when there has been some work."""
        self._unseen += work
        if self._unseen < _WORK_UNSEEN:
            return
        self._unseen = 0
        if time.thread_time() > self._until:
            if self.seconds < RENDER_S:
                raise TakesLonger
            raise TooMuch(f"it takes more than {self.seconds:g} s of processor time")

    def take(self, size: int) -> None:
        """Make so many characters or elements."""
        self.step(1 + size // 1024)
        self._left -= size
        if self._left < 0:
            raise TooMuch(f"it makes more than {_CHARACTERS} characters")


_SECONDS: ContextVar[float] = ContextVar("seconds", default=RENDER_S)
_BUDGET: ContextVar[_Budget | None] = ContextVar("budget", default=None)


@contextmanager
def at_once() -> Iterator[None]:
    """Have what is rendered within take little time, or raise ``TakesLonger``: others wait for the thread."""
    token = _SECONDS.set(AT_ONCE_S)
    try:
        yield
    finally:
        _SECONDS.reset(token)


@contextmanager
def budget() -> Iterator[None]:
    """Give one rendering its budget."""
    token = _BUDGET.set(_Budget(_SECONDS.get()))
    try:
        yield
    finally:
        _BUDGET.reset(token)


def _spend() -> _Budget:
    """Return the budget of the rendering; a new one where a constant is computed while a template is compiled."""
    return _BUDGET.get() or _Budget(RENDER_S)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose templates are bounded, within ``budget``."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, **options)
        del self.globals["lipsum"]
        self.filters |= {_STEPS: _Steps, _JOINED: _joined, _MADE: _made, _COMPARED: _compared, _SLICED: _counted}
        self.filters["tojson"] = to_json
        self.filters = {
            name: one if name.startswith("_") else _bounded(name, cast(Callable[..., Any], one))
            for name, one in self.filters.items()
        }
        self.tests = {name: _bounded_test(cast(Callable[..., Any], one)) for name, one in self.tests.items()}

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """Return the text of a template's, macro's or block's parts."""
        spend, kept = _spend(), list[str]()
        for part in parts:
            spend.take(len(part))
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return what an operator makes of two values."""
        _spend().take(_made_by_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what a function, macro or method returns."""
        method = getattr(__obj, "__wrapped__", __obj)
        name, value = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(value, str):
            _check(name, _compared(value), args, kwargs)
        elif isinstance(value, list | tuple):
            _compared(value)
        elif __obj is dict or __obj is jinja2.utils.Namespace:
            _made([*args, *kwargs.values()])
        return _counted(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may have an attribute."""
        return attr not in _NEVER and super().is_safe_attribute(obj, attr, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Return the tree of a template, in which loops and what makes values without a call are calls of filters."""
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree


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
            operand.expr = _filtered(operand.expr, _COMPARED)
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


class _Steps:
    """The values that a loop goes over; each turn is a step."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        spend = _spend()
        for value in self._values:
            spend.step()
            yield value


def _joined(values: tuple[Any, ...]) -> str:
    """Return the texts of values in one (the operator ``~``)."""
    return "".join([_counted(str(_shown(value))) for value in values])


def _made(value: Any) -> Any:
    """Return a new list, tuple or object, which must not have too much in it."""
    _weigh([value], characters=False)
    return value


def _shown(value: Any) -> Any:
    """Return a value of which text is to be made."""
    if isinstance(value, list | tuple | dict):
        _spend().take(_weigh([value]))
    return value


def _compared(value: Any) -> Any:
    """Return a value that is read to its end without a step, such as an operand of a comparison."""
    if isinstance(value, str | list | tuple | dict):
        _spend().step(1 + _weigh([value]) // 1024)
    return value


def _weigh(waiting: list[Any], *, characters: bool = True) -> int:
    """Return how large the text of values is, about; or how many values there are. Raises TooMuch."""
    spend, size = _spend(), 0
    while waiting:
        one = waiting.pop()
        size += len(one) if characters and isinstance(one, str) else 1
        if isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.keys()
            waiting += one.values()
        if size + len(waiting) > (_CHARACTERS if characters else _ELEMENTS):
            raise TooMuch("it makes too large a value")
        if size & 255 == 0:
            spend.step()
    return size


def _made_by_operator(operator: str, left: Any, right: Any) -> int:
    """Return how much an operator makes. Raises TooMuch: a number or a format that is too large."""
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * abs(right)}.get(operator, 0)
        if bits > _LARGEST_BITS:
            raise TooMuch(f"it computes a number of {bits} bits")
        return 0
    if operator == "%" and isinstance(left, str):
        return _formatted(left, [right])
    if operator == "*":
        sized, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(sized, list | tuple):
            return _weigh([*sized], characters=False) * max(0, int(times))
        return _length(sized) * max(0, int(times)) if isinstance(times, int) else 0
    return _length(left) + _length(right)


def _formatted(form: str, values: Iterable[Any]) -> int:
    """Return about how long a formatted text is."""
    if _WIDE.search(form):
        raise TooMuch("it writes in too wide a format")
    return len(form) + (form.count("%") + form.count("{")) * _weigh([*values])


def _check(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Measure what a method or filter would make of a value. Raises TooMuch."""
    given = [*args, *kwargs.values()]
    is_width = name not in _OF_LISTS | _COMPARE or name in ("batch", "slice")
    if is_width and any(isinstance(one, int) and abs(one) > _LARGEST_NUMBER for one in given):
        raise TooMuch(f"{name} is given a number above {_LARGEST_NUMBER}")
    size = 0
    if name == "replace" and len(given) > 1 and isinstance(value, str):
        size = value.count(str(given[0])) * len(str(given[1]))
    elif name == "join" and given:
        between, values = (given[0], value) if not isinstance(value, str) else (value, given[0])
        size = _weigh([*values]) + _length(values) * _length(between) if isinstance(values, list | tuple) else 0
    elif name == "sum" and any(isinstance(one, list | tuple) for one in given):
        size = _length(value) * _weigh([value], characters=False)  # each sum is a new list
    elif name in ("indent", "expandtabs") and isinstance(value, str):
        widths = [one if isinstance(one, int) else _length(one) for one in given]
        size = (value.count("\n") + value.count("\t") + 1) * max(widths, default=8)
    elif name == "wordwrap":
        size = _length(value) * (1 + sum(map(_length, given)))
    elif name in ("format", "format_map") and isinstance(value, str):
        size = _formatted(value, given)
    _spend().take(size)


def _bounded(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that takes from the budget."""
    leading = hasattr(apply, "jinja_pass_arg")

    @functools.wraps(apply)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, others = args[leading], args[leading + 1 :]
        if isinstance(value, Iterator):
            value = list(_Steps(value))
        if name not in _OF_LISTS:
            _shown(value)
        _check(name, value, others, kwargs)
        return _counted(apply(*args[:leading], value, *others, **kwargs))

    return bounded


def _bounded_test(test: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test whose operands take from the budget, if it compares two or reads a text."""

    @functools.wraps(test)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        for one in args:
            if len(args) > 1 or isinstance(one, str):
                _compared(one)
        return test(*args, **kwargs)

    return bounded


def _counted(value: Any) -> Any:
    _spend().take(_length(value))
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return plain JSON: Jinja's own ``tojson`` escapes for HTML. Halves of surrogate pairs are escaped."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **options)
    parts = [encoder.encode(value)] if indent is None else map(_counted, encoder.iterencode(value))
    return escape_surrogates("".join(parts))
