"""Guides of all kinds as grammars of llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from inflight.engine.guided.ebnf import lark_of_ebnf
from inflight.engine.guided.guide_json import read_json
from inflight.engine.guided.json_schema import schema_grammar
from inflight.engine.guided.lark_guide import HEAD, checked_lark
from inflight.engine.guided.structural_tag import lark_of_tags
from inflight.errors import InvalidRequest
from inflight.sampling import Guide
from inflight.text.patterns import BadPattern, lark_expression

_OF_SCHEMAS = "failed to compile JSON schema: "
_ADVICE = ". Enable 'coerce_one_of'"


class Grammars:
    """Writes guides as grammars, and checks these."""

    def __init__(self, tokens: LLTokenizer, limits: LLParserLimits) -> None:
        """``tokens``: whose names grammars may use; ``limits``: of each grammar."""
        self._tokens, self._limits = tokens, limits

    def of(self, guide: Guide) -> str:
        """Return the grammar of a guide, which llguidance takes.

        Raises:
            InvalidRequest: it is wrong, or it cannot be enforced; the message names what and where.
        """
        with refused_panics():
            _check_characters(guide.text)
            grammar = _GRAMMAR_OF[guide.kind](guide.text, self)
            if (error := self._error_of(grammar)) is not None:
                raise InvalidRequest(f"guided_decoding_guide is refused as {guide.kind}: {error}")
            return grammar

    def error_of_schema(self, form: str) -> str | None:
        """Return why llguidance refuses what ``schema_grammar`` has written, in one line; None: it takes it."""
        return self._error_of(of_schema(form))

    def is_empty(self, lark: str) -> bool:
        """Return whether no text is a sentence of a Lark grammar; also if it is refused, for the whole guide is too."""
        matcher = LLMatcher(self._tokens, HEAD + lark, log_level=0, limits=self._limits)
        may_begin = matcher.is_accepting() or any(matcher.compute_bitmask())
        return not may_begin or matcher.is_error()  # where nothing may come next, that is an error

    def _error_of(self, grammar: str) -> str | None:
        """Return why llguidance refuses a grammar, in one line."""
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens, limits=self._limits)
        if not failed:
            return None
        reason = " ".join(messages[0].partition(_ADVICE)[0].splitlines()[:4])
        _, of_schema, rest = reason.partition(_OF_SCHEMAS)
        return (rest.partition(" 1 | ")[0] if of_schema else reason).strip()[:300]


@contextmanager
def refused_panics() -> Iterator[None]:
    """Make an error of the guide of llguidance's panics, which are no ``Exception`` and have no public class."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest(f"guided_decoding_guide is refused: {str(error).splitlines()[0][:200]}") from None


def of_schema(form: str) -> str:
    """Return the grammar of a schema that ``schema_grammar`` has written."""
    return f"{HEAD}start: %json {form}"


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"guided_decoding_guide: character {error.start} is one half of a surrogate pair"
        ) from None


def _json(_: str, grammars: Grammars) -> str:
    return of_schema(schema_grammar(True, grammars.error_of_schema))


def _json_schema(text: str, grammars: Grammars) -> str:
    return of_schema(schema_grammar(read_json(text), grammars.error_of_schema))


def _regex(text: str, _: Grammars) -> str:
    try:
        return f"{HEAD}start: {lark_expression(text)}"
    except BadPattern as error:
        raise InvalidRequest(f"guided_decoding_guide is refused as regex: {error}") from None


def _ebnf(text: str, _: Grammars) -> str:
    root, lines = lark_of_ebnf(text)
    return f"{HEAD}start: {root}\n{lines}"


def _choice(text: str, _: Grammars) -> str:
    choices = read_json(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidRequest("guided_decoding_guide: the choices must be a JSON list of texts that are not empty")
    # One lexeme for all: one choice may begin with another.
    return f"{HEAD}start: CHOICE\nCHOICE: {' | '.join(json.dumps(one) for one in dict.fromkeys(choices))}"


_GRAMMAR_OF: dict[str, Callable[[str, Grammars], str]] = {
    "json": _json,
    "json_schema": _json_schema,
    "regex": _regex,
    "ebnf_grammar": _ebnf,
    "structural_tag": lambda text, grammars: HEAD + lark_of_tags(text, grammars.error_of_schema, grammars.is_empty),
    "lark_grammar": lambda text, grammars: checked_lark(text, grammars.error_of_schema),
    "choice": _choice,
}
