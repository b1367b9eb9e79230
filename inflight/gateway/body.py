"""The body of a request as an object of JSON: strictly read, within limits, and refused by name.

Python's own reader takes what JSON does not have: NaN and infinities, the last of two equal keys, halves of surrogate
pairs. Each of them is refused here, since the next reader would take it otherwise.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from starlette.requests import Request

from inflight.gateway.errors import ApiError, invalid

MOST_LEVELS = 100
"""How deep objects and arrays may lie in each other: what renders or checks them goes into them by recursion."""
MOST_OF = {",": 1_000_000, ":": 200_000, "[": 200_000, "{": 200_000}
"""How often a body may have these characters, in strings too. They bound how many values it has: one of two bytes takes
64 in memory. Prompts with more are longer than contexts."""
_JSON = re.compile(r"application/([\w.-]+\+)?json", re.ASCII)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Return the object of JSON that ``body`` is, in UTF-8.

    Raises:
        ApiError: 400; the message says what is wrong with it.
    """
    _check_size(body)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: byte {error.start} cannot be decoded") from None
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_float, parse_int=_int
        )
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"the body is a JSON {_kind(value)}; it must be an object")
    if body.count(b"{") + body.count(b"[") > MOST_LEVELS:
        _check_depth(value)
    if _SURROGATE.search(body):
        _check_surrogates(value)
    return value


def _check_size(body: bytes | bytearray) -> None:
    for mark, most in MOST_OF.items():
        if (count := body.count(mark.encode())) > most:
            raise invalid(f"the body has {count} times the character {mark!r}; the limit is {most}")


def check_type(request: Request) -> None:
    """Refuse other types: web pages may send those anywhere without being asked, and JSON only with CORS.

    Raises:
        ApiError: 415.
    """
    given = request.headers.get("content-type", "")
    name, _, parameters = given.partition(";")
    charset = re.search(r'charset\s*=\s*"?([\w-]+)', parameters, re.IGNORECASE)
    if not _JSON.fullmatch(name.strip().lower()) or (charset and charset[1].lower() not in ("utf-8", "utf8")):
        said = f"the content type is {given[:100]!r}" if given else "there is no content type"
        message = f"{said}; send the header `content-type: application/json`, in UTF-8"
        raise ApiError(415, message, code="unsupported_media_type")
    if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise ApiError(415, f"content-encoding is {coding[:100]!r}; it is not served", code="unsupported_media_type")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise invalid(f"the body has the key {name[:100]!r} twice in one object", name)
    return result


def _no_constant(name: str) -> NoReturn:
    raise invalid(f"the body is not valid JSON: {name} is not a number")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise invalid(f"the body has the number {digits[:40]}, which is out of range")
    return value


def _int(digits: str) -> int:
    if len(digits) > 40:
        raise invalid(f"the body has a number with {len(digits)} digits, which is out of range")
    return int(digits)


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _too_deep() -> ApiError:
    return invalid(f"the body has objects or arrays more than {MOST_LEVELS} levels deep")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise _too_deep()


def _inside(value: Any) -> list[Any]:
    """Return the objects and arrays directly inside of one."""
    return [inner for inner in (value.values() if isinstance(value, dict) else value) if isinstance(inner, dict | list)]


def _check_surrogates(value: dict[str, Any]) -> None:
    """Refuse a lone surrogate, with the path of its field. Pairs of them are characters already."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, one = waiting.pop()
        if isinstance(one, dict):
            for key in one:
                check_text(key, path)
            waiting += [(f"{path}.{key}" if path else key, inner) for key, inner in one.items()]
        elif isinstance(one, list):
            waiting += [(f"{path}[{index}]", inner) for index, inner in enumerate(one)]
        elif isinstance(one, str):
            check_text(one, path)


def check_text(text: str, path: str) -> None:
    """Refuse a text of what is no characters. Raises ApiError: 400, naming its ``path``."""
    try:
        text.encode()
    except UnicodeEncodeError:
        where = path or "a key"
        raise invalid(
            f"{where} has a lone surrogate (half of a \\u escape pair); it is not a character", path
        ) from None
