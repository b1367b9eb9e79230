"""What a frame draws with characters: bars, lines of bars, maps of blocks; and numbers that may be unknown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from inflight.report.units import duration, quantity

UNKNOWN = "–"
USED, MIXED, CACHED, FREE = "█", "▓", "▒", "·"
_SPARKS = "▁▂▃▄▅▆▇█"
_STYLES = {USED: "cyan", MIXED: "cyan", CACHED: "yellow", FREE: "dim"}


def number(value: float | None) -> str:
    """Return a number as it is read."""
    return UNKNOWN if value is None else quantity(value)


def time(seconds: float | None) -> str:
    """Return a time as it is read."""
    return UNKNOWN if seconds is None else duration(seconds)


def percent(share: float | None) -> str:
    """Return a share of one in percent."""
    return UNKNOWN if share is None else f"{share:.0%}"


def dim(text: str) -> Text:
    """Return a text of less weight."""
    return Text(text, style="dim")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last ``width`` values as bars, the highest of them as high as can be."""
    shown = values[-max(1, width) :]
    peak = max(shown, default=0.0)
    return "".join(_SPARKS[round(value / peak * (len(_SPARKS) - 1))] if peak else _SPARKS[0] for value in shown)


def gauge(name: str, value: float | None, limit: float | None, width: int, style: str) -> Text:
    """Return a bar with its name before it and its numbers behind."""
    if value is None or not limit:
        return Text(f"{name:8}{UNKNOWN}")
    numbers = f" {value:g} of {limit:g}"
    room = max(4, width - 8 - len(numbers))
    filled = min(room, round(value / limit * room)) or int(value > 0)
    return Text.assemble(f"{name:8}", ("█" * filled, style), ("·" * (room - filled), "dim"), numbers)


def block_map(states: Sequence[str], width: int, rows: int) -> list[str]:
    """Return the lines of a map of blocks; where there is no room for one each, a character stands for several."""
    group = max(1, -(-len(states) // (width * rows)))
    cells = "".join(_cell(states[first : first + group]) for first in range(0, len(states), group))
    return [cells[first : first + width] for first in range(0, len(cells), width)]


def _cell(states: Sequence[str]) -> str:
    used = states.count("used")
    if used:
        return USED if used == len(states) else MIXED
    return CACHED if "cached" in states else FREE


def map_text(lines: Sequence[str]) -> Text:
    """Return a map with a style for each kind of block."""
    text = Text("\n".join(lines), no_wrap=True)
    for character, style in _STYLES.items():
        text.highlight_regex(f"{character}+", style)
    return text
