"""Guides of all kinds as grammars of llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from inflight.engine.guided.ebnf import lark_of_ebnf
from inflight.engine.guided.json_schema import schema_grammar
from inflight.engine.guided.lark import HEAD, checked_lark
from inflight.engine.guided.structural_tag import lark_of_tags
from inflight.errors import InvalidRequest
from inflight.sampling import Guide

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
        grammar = _GRAMMAR_OF[guide.kind](guide.text, self._error_of_schema)
        if (error := self._error_of(grammar)) is not None:
            raise InvalidRequest(f"guided_decoding_guide is refused as {guide.kind}: {error}")
        return grammar

    def _error_of_schema(self, form: str) -> str | None:
        return self._error_of(of_schema(form))

    def _error_of(self, grammar: str) -> str | None:
        """Return why llguidance refuses a grammar, in one line."""
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokens, limits=self._limits)
        if not failed:
            return None
        reason = " ".join(messages[0].partition(_ADVICE)[0].splitlines()[:4])
        _, of_schema, rest = reason.partition(_OF_SCHEMAS)
        return (rest.partition(" 1 | ")[0] if of_schema else reason).strip()[:300]


def of_schema(form: str) -> str:
    """Return the grammar of a schema that ``schema_grammar`` has written."""
    return f"{HEAD}start: %json {form}"


_ErrorOf = Callable[[str], str | None]


def _json(_: str, error_of: _ErrorOf) -> str:
    return of_schema(schema_grammar(True, error_of))


def _json_schema(text: str, error_of: _ErrorOf) -> str:
    return of_schema(schema_grammar(json.loads(text), error_of))


def _regex(text: str, _: _ErrorOf) -> str:
    return f"{HEAD}start: /{regex_to_lark(text, use_ascii='')}/"


def _ebnf(text: str, _: _ErrorOf) -> str:
    root, lines = lark_of_ebnf(text)
    return f"{HEAD}start: {root}\n{lines}"


def _choice(text: str, _: _ErrorOf) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidRequest("guided_decoding_guide: the choices must be a JSON list of texts that are not empty")
    # One lexeme for all: one choice may begin with another.
    return f"{HEAD}start: CHOICE\nCHOICE: {' | '.join(json.dumps(one) for one in dict.fromkeys(choices))}"


_GRAMMAR_OF: dict[str, Callable[[str, _ErrorOf], str]] = {
    "json": _json,
    "json_schema": _json_schema,
    "regex": _regex,
    "ebnf_grammar": _ebnf,
    "structural_tag": lambda text, error_of: HEAD + lark_of_tags(text, error_of),
    "lark_grammar": checked_lark,
    "choice": _choice,
}
