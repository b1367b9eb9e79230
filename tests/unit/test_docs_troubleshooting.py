"""The messages that docs/troubleshooting.md quotes are ones that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tables import each_row

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
SOURCES = [*(ROOT / "inflight").rglob("*.py"), ROOT / "scripts/setup.py"]


@pytest.fixture(scope="module")
def sources() -> str:
    """All that the code says, strings that continue on the next line joined, values of f-strings left out."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_there_are_some() -> None:
    assert len(QUOTED) > 15


@each_row("message", QUOTED)
def test_a_quoted_message_is_in_the_code(message: str, sources: str) -> None:
    known = {"(Address already in use)": "({error.strerror})", "Permission denied": "{error.strerror"}
    for words, code in known.items():
        message = message.replace(words, code)
    for part in message.split("…"):
        assert part.strip(" ;") in sources
