"""docs/gateway.md has every route that the gateway serves, and the codes of its errors are the code's own."""

from __future__ import annotations

import re
from pathlib import Path

from inflight.gateway.app import ROUTES
from tests.support.tables import each_row

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gateway.md").read_text()
CODES = sorted(
    {code for row in re.findall(r"^\| \d+[\d, ]* \|(.*?)\|", PAGE, re.MULTILINE) for code in row.split("`")[1::2]}
)


def test_every_route_is_on_the_page() -> None:
    served = {(one.method, one.path.replace(":path}", "}")) for one in ROUTES}
    assert served == set(re.findall(r"`(GET|POST) (/[\w/{}]*)`", PAGE))


def test_there_are_codes() -> None:
    assert len(CODES) > 15


@each_row("code", CODES)
def test_a_code_is_one_of_the_sources(code: str) -> None:
    sources = [path.read_text() for path in (ROOT / "inflight/gateway").rglob("*.py")]
    assert any(f'"{code}"' in source for source in sources)
