"""What a template may call, and what each call costs, in characters, before it is made.

A method or filter that is not named here does not exist for a template. A cost is an upper bound of the work and of
what is made, so that no call is begun that the budget cannot bear.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from jinja2.filters import do_mark_safe
from jinja2.runtime import BlockReference, LoopContext, Macro, TemplateReference, Undefined
from jinja2.utils import Cycler, Joiner, Namespace

from inflight.text.template_budget import TooMuch, elements, length, spend, weight

_MOST_BITS = 64
"""The bits of a number that is made. Python's hashes have 61: thousands of longer numbers could have the same."""
_OPERAND_BITS = 1024
"""The bits of a number that is computed with, and of a power before it is known."""
_WIDEST = 1_000_000
"""The largest width or precision in a format."""
_LONGEST_FORMAT = 1 << 16
_SOUGHT, _ELEMENT, _LOOKED_UP, _PART, _SORTED, _SLOW = 2, 4, 8, 8, 256, 64
"""The characters that are as much work as one in a search, as an element that is copied, as a character that is looked
up, as a part that becomes a text of its own, as an element that is sorted, and as a character for which Python code
runs."""
_COMPARISONS = 16
"""The comparisons of two characters that are as much work as one character."""
_CONVERSION = re.compile(r"(?:%[#0\- +]*|\)[#0\- +]*)(\*|\d*)(?:\.(\*|\d*))?")
"""What may be a conversion of ``%``, with its width and precision; a key in brackets may hold anything.

No other thread runs during a search, so its time must be linear: each repetition can stop in one place only."""

_READS = frozenset(
    "center endswith isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle isupper ljust "
    "removeprefix removesuffix rjust startswith zfill".split()
)
"""The methods of texts that read their value and arguments once."""
_FINDS = frozenset("count find index partition".split())
"""Those that look for a text from the left."""
_CASES = frozenset("capitalize casefold lower swapcase title upper".split())
"""Those that look each character up."""
_SEARCHES = frozenset("lstrip rfind rindex rpartition rstrip strip".split())
"""Those that compare each character of the value with those of the argument."""
_OF_TEXTS = _READS | _FINDS | _CASES | _SEARCHES | frozenset("expandtabs join replace rsplit split splitlines".split())
METHODS: dict[type, frozenset[str]] = {
    str: _OF_TEXTS,
    type(do_mark_safe("")): _OF_TEXTS,
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
}
"""The methods that a template may call, by the type of the value, beside those that format. None makes bytes."""
OWN = (Namespace, LoopContext, Macro, Cycler, Joiner, BlockReference, TemplateReference, Undefined)
"""The types of Jinja's own whose public attributes a template may have."""

_FREE = frozenset(
    "abs attr count d default first items last length map random reject rejectattr reverse safe select "
    "selectattr".split()
)
_READING = frozenset("center e escape forceescape string truncate".split())
_SORTING = frozenset("dictsort groupby max min sort unique".split())
_PYTHON = frozenset("filesizeformat title urlencode wordcount".split())


def method_cost(name: str, value: str, given: list[Any]) -> int:
    """Return what one of the ``METHODS`` of a text costs. Raises TooMuch: it makes too large a value."""
    if (special := _SPECIAL.get(name)) is not None:
        return special(value, given)
    return _read(value, given)


def filter_cost(name: str, value: Any, given: list[Any]) -> int:
    """Return what one of the ``FILTERS`` costs. Raises TooMuch: it makes too large a value."""
    if name in _FREE:
        return 1
    if name in _READING:
        return _read(value, given)
    if name in _PYTHON:
        return _SLOW * _read(value, given)
    if name in _SORTING:
        for one in value if name == "unique" and isinstance(value, list | tuple) else ():
            check_number(one)
        return _SORTED * length(value) + _ELEMENT * _read(value, given)
    return _SPECIAL_FILTERS[name](value, given)


def operator_cost(operator: str, left: Any, right: Any) -> int:
    """Return what a binary operator costs. Raises TooMuch: a number or a format is too large."""
    if isinstance(left, int) and isinstance(right, int):
        check_number(left, _OPERAND_BITS)
        check_number(right, _OPERAND_BITS)
        if operator == "**" and left.bit_length() * abs(right) > _OPERAND_BITS:
            raise TooMuch(f"it computes a number of more than {_OPERAND_BITS} bits")
        return 1
    if operator == "%" and isinstance(left, str):
        return _format_cost(left, [right])
    if operator == "*":
        sized, times = (right, left) if isinstance(left, int) else (left, right)
        if not isinstance(times, int):
            return 1
        made = elements(sized) * _ELEMENT if isinstance(sized, list | tuple) else length(sized)
        return made * max(0, times)
    return _copied(left) + _copied(right)


def check_form(form: str) -> int:
    """Return the length of a format. Raises TooMuch."""
    if len(form) > _LONGEST_FORMAT:
        raise TooMuch(f"a format has more than {_LONGEST_FORMAT} characters")
    return len(form)


def field_cost(value: Any, spec: str) -> int:
    """Return what a field of ``str.format`` costs. Raises TooMuch: a width or precision is too large."""
    return weight(value, shown=True) + sum(map(_check_width, re.findall(r"\d+", spec)))


def made(value: Any) -> Any:
    """Return a value that was made, which takes its size from the budget. Raises TooMuch."""
    spend().take(_copied(value))
    return value


def _copied(value: Any) -> int:
    return length(value) * (1 if isinstance(value, str) else _ELEMENT)


def check_number(value: Any, most: int = _MOST_BITS) -> None:
    """Check that a value, if it is a whole number, is no long one. Raises TooMuch: it is."""
    if isinstance(value, int) and value.bit_length() > most:
        raise TooMuch(f"it computes with a number of more than {most} bits")


def _check_width(digits: str) -> int:
    if len(digits) > len(str(_WIDEST)) or int(digits or 0) > _WIDEST:
        raise TooMuch(f"it is given a width above {_WIDEST}")
    return int(digits or 0)


def _weight(value: Any) -> int:
    return 1 + len(value) if isinstance(value, str) else weight(value)


def _size(given: Iterable[Any]) -> int:
    """Return the size of arguments, of which a number may be a width or a number of repetitions."""
    return sum(abs(one) if isinstance(one, int) else _weight(one) for one in given)


def _read(value: Any, given: list[Any]) -> int:
    return _weight(value) + _size(given)


def _product(value: Any, given: list[Any]) -> int:
    return _weight(value) * (1 + _size(given))


def _searched(value: Any, given: list[Any]) -> int:
    """Return the cost of comparing each character with each of an argument."""
    return _weight(value) * (_COMPARISONS + _size(given)) // _COMPARISONS


def _split(value: str, given: list[Any]) -> int:
    """Return the cost of the parts of a text, of which there are no more than separators."""
    separator = given[0] if given else None
    if isinstance(separator, str) and separator:
        return _SOUGHT * len(value) + len(separator) + _PART * value.count(separator)
    return 2 * len(value)


def _rsplit(value: str, given: list[Any]) -> int:
    return _searched(value, given[:1]) + _split(value, given)


def _cased(value: Any, _: list[Any]) -> int:
    return _weight(value) * (1 if isinstance(value, str) and value.isascii() else _LOOKED_UP)


def _listed(value: Any, _: list[Any]) -> int:
    return _PART * len(value) if isinstance(value, str) else _ELEMENT * length(value)


def _grouped(value: Any, given: list[Any]) -> int:
    """Return the cost of groups of a size, the last of which may be filled up."""
    return _listed(value, []) * (1 + sum(abs(one) for one in given if isinstance(one, int)))


def _replaced(value: Any, given: list[Any]) -> int:
    texts = [one for one in (value, *given[:2]) if isinstance(one, str)]
    if len(texts) < 3:
        return _product(value, given)
    text, old, new = texts
    return _SOUGHT * len(text) + len(old) + text.count(old) * (_ELEMENT + len(new))


def _joined(separator: Any, values: Any) -> int:
    each = _SLOW if isinstance(values, str) else _PART
    return weight(values, separator) + length(values) * (each + length(separator))


def _widened(value: Any, given: list[Any]) -> int:
    """Return the cost of the widths that lines or tabulators get."""
    widths = [abs(one) if isinstance(one, int) else length(one) for one in given]
    text = value if isinstance(value, str) else ""
    return 2 * len(text) + (text.count("\n") + text.count("\t") + 1) * max([8, *widths])


def _summed(value: Any, given: list[Any]) -> int:
    """Return the cost of a sum; each sum of lists is a new list."""
    adds_lists = any(isinstance(one, list | tuple) for one in given)
    return weight(value) + (length(value) * elements(value) if adds_lists else _size(given))


def _rounded(_: Any, given: list[Any]) -> int:
    """Return the cost of a power of ten with such an exponent."""
    return _size(given) ** 2


def _format_cost(form: str, values: list[Any]) -> int:
    """Return about how long a formatted text is (the operator ``%``). Raises TooMuch: a width is too large."""
    size, widths = check_form(form), 0
    for found in _CONVERSION.finditer(form):
        if "*" in found.groups() and found[0].startswith("%"):
            raise TooMuch("it takes the width of a format from the values")
        widths += sum(_check_width(digits) for digits in found.groups() if digits and digits != "*")
    return size + widths + form.count("%") * weight(*values, shown=True)


def _json_cost(value: Any, given: list[Any]) -> int:
    """Return the cost of JSON, in which each value may have the separators and the indent around it."""
    text = weight(value, shown=True)
    return text + elements(value) * _size(given) if given else text


_SPECIAL: dict[str, Callable[[Any, list[Any]], int]] = {
    "expandtabs": _widened,
    "join": lambda value, given: _joined(value, given[0] if given else ()),
    "replace": _replaced,
    "rsplit": _rsplit,
    "split": _split,
    "splitlines": _split,
    **dict.fromkeys(_FINDS, lambda value, given: _SOUGHT * _read(value, given)),
    **dict.fromkeys(_CASES, _cased),
    **dict.fromkeys(_SEARCHES, _searched),
}
"""By method, what it costs."""
_SPECIAL_FILTERS: dict[str, Callable[[Any, list[Any]], int]] = {
    "batch": _grouped,
    "float": lambda value, _: _weight(value),
    "format": lambda value, given: _format_cost(str(value), given),
    "indent": _widened,
    "int": lambda value, _: _weight(value),
    "join": lambda value, given: _joined(given[0] if given else "", value),
    "list": _listed,
    "replace": _replaced,
    "round": _rounded,
    "slice": _grouped,
    "sum": _summed,
    "tojson": _json_cost,
    "trim": _searched,
    **dict.fromkeys(("capitalize", "lower", "upper"), _cased),
}
"""By filter, what it costs."""
MAKES_NUMBERS = frozenset({"int", "round", "sum"})
FILTERS = _FREE | _READING | _SORTING | _PYTHON | _SPECIAL_FILTERS.keys()
"""The filters that a template may use."""
