"""Lark grammars, in llguidance's dialect: what needs more than masks is refused, and schemas inside are checked.

The dialect can set temperatures and limits of tokens, and can take text back. The engine does none of these, and they
would be ignored. A schema behind ``%json`` is held to what ``json_schema`` enforces.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from inflight.engine.guided.guide_json import decode_json
from inflight.engine.guided.json_schema import schema_grammar
from inflight.errors import InvalidRequest

HEAD = '%llguidance {"no_forcing": true}\n'
"""Begins each grammar: the model chooses among all tokenizations of a text, and masks need no tokenizer."""
_PIECE = re.compile(
    r"""(?P<skip>\#[^\n]*|//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>)"""
    r"""|(?P<json>%json\b)|(?P<directive>%[a-z]+)|\b(?P<option>max_tokens|temperature|stop|stop_capture)\s*=""",
    re.DOTALL,
)
_DIRECTIVES = ("%ignore", "%import", "%regex")


def checked_lark(text: str, error_of_schema: Callable[[str], str | None]) -> str:
    """Return a Lark grammar as llguidance takes it.

    Args:
        text: the grammar; its first rule is ``start``.
        error_of_schema: as ``schema_grammar`` takes it.

    Raises:
        InvalidRequest: naming the option, the directive or the keyword that is not served, and the line.
    """
    made, place = [HEAD], 0
    while (piece := _PIECE.search(text, place)) is not None:
        made.append(text[place : piece.start()])
        line = text.count("\n", 0, piece.start()) + 1
        if piece["json"]:
            what = f"%json in line {line}"
            schema, place = decode_json(text, piece.end(), what)
            try:
                made.append(f"%json {schema_grammar(schema, error_of_schema)} ")
            except InvalidRequest as error:
                raise InvalidRequest(f"guided_decoding_guide: {what}: {str(error).partition(': ')[2]}") from None
            continue
        if piece["directive"] and piece["directive"] not in _DIRECTIVES:
            place = _checked_options(piece["directive"], text, piece.end(), line)
            continue
        if piece["option"]:
            raise InvalidRequest(f"guided_decoding_guide: the option {piece['option']} in line {line} is not supported")
        made.append(piece[0])
        place = piece.end()
    return "".join([*made, text[place:]])


def _checked_options(directive: str, text: str, start: int, line: int) -> int:
    """Return the end of an ``%llguidance`` that sets nothing; anything else is refused."""
    if directive == "%llguidance":
        options, end = decode_json(text, start, f"%llguidance in line {line}")
        if options == {}:
            return end
        raise InvalidRequest(f"guided_decoding_guide: %llguidance in line {line} sets options; they are the server's")
    raise InvalidRequest(f"guided_decoding_guide: the directive {directive} in line {line} is not supported")
