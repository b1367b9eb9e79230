"""Breaks streamed text into lines of a terminal's width: between words, and never inside one that fits a line.

Nothing is known here of terminals but how many columns they have. Text is held back until it is known where it goes: a
word until what follows it has come. Lines of code blocks, and words longer than a line, are left as they are, so that
they can be copied; the terminal itself folds these.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from wcwidth import iter_graphemes, wcswidth

_CLOSING = frozenset(",.;:!?)]}%、。，．！？：；）］｝」』】〉》”’…")
"""Characters that begin no line."""
_OPENING = frozenset("（［｛「『【〈《“‘")
"""Characters that end no line."""
_UNBROKEN_BLANKS = frozenset("\u00a0\u2007\u202f")
_FENCES = ("```", "~~~")
_TAB = 8
_VISIBLE = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t\r"},
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    0x7F: "\u2421",
    ord("\r"): None,
}
"""Control characters, which would act on the terminal, as what can be seen of them."""
_BREAK, _BLANK, _WIDE, _NARROW = "break", "blank", "wide", "narrow"


def visible(text: str) -> str:
    """Return a text for a terminal: its control characters are shown and not obeyed; lines and tabs stay."""
    return text.translate(_VISIBLE)


@dataclass
class Wrapper:
    """Wraps one text, which comes in pieces."""

    columns: Callable[[], int]
    """Returns how many the terminal has now; it may change under way."""
    _held: str = ""
    _blanks: str = ""
    """Blanks that are not written yet: a break may take their place."""
    _column: int = 0
    _fresh: bool = True
    """Whether the text's own line has had no word yet."""
    _code: bool = False
    _folding: bool = False
    """Whether a word longer than a line was begun, which what comes next may belong to."""

    def feed(self, text: str) -> str:
        """Take the next piece in; return what can be written of all that has come."""
        units = list(_units(self._held + visible(text)))
        self._held = units.pop() if units else ""
        if _kind_of(self._held) == _BREAK:
            units.append(self._held)
            self._held = ""
        else:
            units.append(self._take_long_word())
        return "".join(map(self._place, units))

    def _take_long_word(self) -> str:
        """Take what is held of a word that is longer than a line: what follows does not change where it goes.

        Its last character stays, to which more may belong.
        """
        *graphemes, last = list(_graphemes(self._held)) or [""]
        word = "".join(graphemes)
        whole = word[-1:] not in _OPENING and all(_kind(grapheme) == _NARROW for grapheme in graphemes)
        if not whole or _width(word) <= self.columns():
            return ""
        self._held = last
        return word

    def end(self) -> str:
        """Return what was held back: the text has ended."""
        rest, self._held = self._place(self._held), ""
        return rest

    def _place(self, unit: str) -> str:
        """Return the unit, with a break before it where it needs one."""
        if not unit:
            return ""
        kind = _kind_of(unit)
        goes_on = self._folding and (kind == _NARROW or unit[0] in _CLOSING)
        self._folding = False
        if kind == _BREAK:
            self._column, self._blanks, self._fresh = 0, "", True
            return unit
        if kind == _BLANK:
            self._blanks += unit
            return ""
        blanks, self._blanks = self._blanks, ""
        if self._fresh and unit.startswith(_FENCES):
            self._code = not self._code
        self._fresh = False
        if self._code:
            return blanks + unit
        return self._fit(blanks, unit, goes_on)

    def _fit(self, blanks: str, word: str, goes_on: bool) -> str:
        """Return a word after blanks; a break takes their place where it does not fit behind them."""
        room, width = self.columns(), _width(word)
        column, broken = self._column, ""
        for blank in blanks:
            column += _TAB - column % _TAB if blank == "\t" else _width(blank)
        if column + width > room and not goes_on and (self._column > 0 or width <= room):
            column, broken, blanks = 0, "\n" if self._column > 0 else "", ""
        column += width
        self._column = column if column <= room else column % room or room
        self._folding = goes_on or width > room
        return broken + blanks + word


def _width(text: str) -> int:
    return max(wcswidth(text), 0)


def _units(text: str) -> Iterator[str]:
    """Yield the pieces between which a line may break: words, runs of blanks, line feeds, and single wide characters.

    A wide character takes closing punctuation with it, and an opening bracket takes what follows.
    """
    unit, kind = "", ""
    for grapheme in _graphemes(text):
        next_kind = _kind(grapheme)
        words = kind in (_WIDE, _NARROW) and next_kind in (_WIDE, _NARROW)
        if words and (grapheme in _CLOSING or unit[-1] in _OPENING):
            unit, kind = unit + grapheme, (kind if grapheme in _CLOSING else next_kind)
        elif kind == next_kind and kind in (_BLANK, _NARROW):
            unit += grapheme
        else:
            if unit:
                yield unit
            unit, kind = grapheme, next_kind
    if unit:
        yield unit


def _kind_of(unit: str) -> str:
    return _kind(next(_graphemes(unit))) if unit else _BLANK


def _graphemes(text: str) -> Iterator[str]:
    """Yield what is seen as one character; a mark behind a blank is one of its own, so that the blank stays one."""
    for grapheme in iter_graphemes(text):
        if len(grapheme) > 1 and _is_blank(grapheme[0]):
            yield grapheme[0]
            yield grapheme[1:]
        else:
            yield grapheme


def _is_blank(character: str) -> bool:
    return character == "\t" or (unicodedata.category(character) == "Zs" and character not in _UNBROKEN_BLANKS)


def _kind(grapheme: str) -> str:
    first = grapheme[0]
    if first == "\n":
        return _BREAK
    if _is_blank(first):
        return _BLANK
    hangul = unicodedata.name(first, "").startswith("HANGUL")  # wide, but it has blanks between words
    return _WIDE if _width(grapheme) > 1 and not hangul else _NARROW
