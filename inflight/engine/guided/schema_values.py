"""Values of keywords that llguidance would take for others, or that no text of its grammars can be valid by."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from decimal import ROUND_DOWN, Decimal
from typing import Any, TypeGuard

from inflight.engine.guided.refusals import refusal
from inflight.engine.guided.schema_keywords import Path

_LARGEST = 2**53 - 1
"""Up to it every integer is a double, and so are its neighbours."""
_LARGEST_PRODUCT = 2**32 - 1
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that llguidance writes by their numbers (``\\u001b``) alone, which its grammars may not do here."""
_MOST_TENS = 22
"""The power of ten up to which these are doubles."""
_ABOVE_ZERO, _DIGITS = Decimal("1e-30"), 14
"""How far behind an exclusive bound a number has to lie: behind 0 this far, behind others in so many digits."""
_EXCLUSIVE = {"exclusiveMinimum": ("minimum", 1), "exclusiveMaximum": ("maximum", -1)}


def check_bound(path: Path, keyword: str, value: Any) -> None:
    """Refuse a bound that llguidance (1.9.1) takes for another."""
    if _is_number(value) and not _is_read_as_meant(value):
        raise refusal(path, keyword, f"{value} has too many digits to be enforced exactly")


def check_constants(path: Path, keyword: str, value: Any) -> None:
    """Refuse values that no text could be, as llguidance writes them.

    These are characters that it would have to write by their numbers, and numbers that a double may not hold: it
    (1.9.1) rounds integers, or ends the process at them (-2**63).
    """
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict | list):
            rest.extend(one.values() if isinstance(one, dict) else one)
        elif isinstance(one, str) and (character := _UNWRITABLE.search(one)) is not None:
            raise refusal(path, keyword, f"the control character U+{ord(character[0]):04X} cannot be written")
        elif _is_number(one) and not _is_read_as_meant(one):
            raise refusal(path, keyword, f"{one} has too many digits to be enforced exactly")


def check_together(path: Path, schema: dict[str, Any]) -> None:
    """Refuse keywords that are not enforced beside others.

    A least number of properties could be made up by repeated names; items of another schema could pass for additional;
    beside the items of an older draft those of a newer one are not looked at.
    """
    if "additionalItems" in schema and not schema.keys().isdisjoint(("allOf", "anyOf", "oneOf", "$ref")):
        raise refusal(path, "additionalItems", "it cannot be enforced beside allOf, anyOf, oneOf or $ref")
    if "prefixItems" in schema and ("additionalItems" in schema or isinstance(schema.get("items"), list)):
        raise refusal(path, "prefixItems", "it cannot be enforced beside additionalItems or a list of items")
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    names = {one for one in required if isinstance(one, str)} if isinstance(required, list) else set[str]()
    if isinstance(least, int) and least > len(names) + 1:
        raise refusal(path, "minProperties", f"it can be enforced up to {len(names) + 1}: `required` and one more")


def check_multiples(multiples: Sequence[tuple[Path, Any]]) -> None:
    """Refuse divisors whose least common multiple llguidance (1.9.1) would compute modulo 2**32.

    Args:
        multiples: the places of ``multipleOf`` and its values, any of which may hold for one number.
    """
    divisors = [(path, abs(Decimal(repr(value)))) for path, value in multiples if _is_number(value) and value]
    digits = max((-int(one.normalize().as_tuple().exponent) for _, one in divisors), default=0)
    common = largest = 1
    for path, divisor in divisors:
        whole = int(divisor.scaleb(max(digits, 0)))
        common, largest = math.lcm(common, whole), max(largest, whole)
        if common * largest > _LARGEST_PRODUCT:
            raise refusal(
                path, "multipleOf", "beside the others, and allOf, anyOf, oneOf or $ref, it has too many digits"
            )


def bounds_as_read(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return what must hold beside a schema's exclusive bounds: they hold for the double that a text is read as.

    A text such as 0.1000000000000000001 lies above 0.1, and is read as 0.1. So another bound lies some doubles apart.
    Below a bound such as 0.99999999999999, llguidance (1.9.1) has no place for 0.9, 0.99 and so on: they are listed.

    Returns:
        The keywords, each with the schema that must hold as well.
    """
    made = []
    for keyword, (beside, sign) in _EXCLUSIVE.items():
        value = schema.get(keyword) if schema.get("type") != "integer" else None
        value = schema.get(beside) if value is True else value  # draft 4 says true beside a bound
        if _is_number(value):
            bound = _behind(Decimal(repr(value)), sign)
            shorter = [one for one in _shorter(bound) if (one - value) * sign > 0]
            made.append((keyword, {"anyOf": [{keyword: float(bound)}, *([{"enum": shorter}] if shorter else [])]}))
    return made


def _behind(bound: Decimal, sign: int) -> Decimal:
    if not bound:
        return sign * _ABOVE_ZERO
    return bound + sign * Decimal(10) ** (bound.adjusted() - _DIGITS)


def _shorter(number: Decimal) -> list[float]:
    """Return what is left of a number with fewer digits behind the point, down to one."""
    digits = -int(number.as_tuple().exponent)
    return [float(number.quantize(Decimal(10) ** -kept, ROUND_DOWN)) for kept in range(1, min(digits, _MOST_TENS))]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_read_as_meant(number: float) -> bool:
    """Return whether llguidance reads a number as what its digits say: it rounds what has more of them."""
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    if abs(number) > _LARGEST or not isinstance(exponent, int) or abs(exponent) > _MOST_TENS:
        return False
    return int("".join(map(str, digits))) <= _LARGEST
