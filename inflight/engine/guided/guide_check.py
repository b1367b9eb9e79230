"""The check of a guide: all that compiling it takes, within limits. It is done in a process that may hang or crash."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from inflight.engine.guided.grammar import Grammars
from inflight.engine.guided.vocabulary import clear_bit
from inflight.errors import InvalidRequest
from inflight.sampling import Guide

_ROW_ITEMS, _MASK_ITEMS, _MASK_FUEL = 2000, 20_000, 100_000
"""Limits of one mask: the items of a row of the parser, those of all rows that the mask looks at, and the fuel of the
lexer. Together they end a mask after some tenths of a second at most: a row of an ambiguous grammar can take the square
of its items, and 100,000 of fuel take about 10 ms. An object with 400 properties that may be left out needs 1,600 items
in a row."""


@dataclass(frozen=True, slots=True)
class CheckedGuide:
    """A guide that can be compiled."""

    grammar: str
    """As llguidance takes it."""
    heap_bytes: int
    """Of memory that the compiled guide takes; 0: it is not known."""


def parser_limits(max_grammar_size: int, max_lexer_states: int) -> LLParserLimits:
    """Return llguidance's limits of each grammar."""
    return LLParserLimits(
        max_grammar_size=max_grammar_size,
        max_lexer_states=max_lexer_states,
        max_items_in_row=_ROW_ITEMS,
        step_max_items=_MASK_ITEMS,
        step_lexer_fuel=_MASK_FUEL,
        verbose_errors=False,
    )


def checked_guide(guide: Guide, tokens: LLTokenizer, limits: LLParserLimits) -> CheckedGuide:
    """Compile a guide, and compute its first mask.

    Raises:
        InvalidRequest: it is wrong, it cannot be enforced, or it allows nothing.
    """
    before = heap_bytes()
    grammar = Grammars(tokens, limits).of(guide)
    matcher = compile_grammar(grammar, tokens, limits)
    first = matcher.deep_copy()
    mask = np.frombuffer(first.compute_bitmask(), np.int32).copy()
    clear_bit(mask, tokens.eos_token)
    reason = first.get_error().splitlines()[0][:300] if first.is_error() else ""
    if reason and not reason.startswith("NoExtension"):
        raise InvalidRequest(f"guided_decoding_guide cannot be followed: {reason}")
    if reason or not (mask.any() or matcher.is_accepting()):
        raise InvalidRequest("guided_decoding_guide allows no text that this model's tokens can spell")
    return CheckedGuide(grammar, max(0, heap_bytes() - before))


def compile_grammar(grammar: str, tokens: LLTokenizer, limits: LLParserLimits) -> LLMatcher:
    """Return a matcher of a grammar. Raises InvalidRequest: llguidance refuses it."""
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise InvalidRequest(f"guided_decoding_guide is refused: {matcher.get_error().splitlines()[0][:300]}")
    return matcher


class _Mallinfo2(ctypes.Structure):
    """What glibc says of the heap; see mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _heap_reader() -> Callable[[], int]:
    """Return what reads the bytes of the heap that are in use; 0 where the C library does not say it."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return lambda: 0
    mallinfo2.restype = _Mallinfo2

    def read() -> int:
        found = mallinfo2()
        return int(found.uordblks + found.hblkhd)

    return read


heap_bytes = _heap_reader()
"""Returns the bytes of this process's heap that are in use; 0: they are not known."""
